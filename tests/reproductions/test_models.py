"""The models of the published tables."""

from __future__ import annotations

import torch
from torch import nn

from batchfinder.reproductions.models import build_seq2seq


def test_parameters() -> None:
    """Each part has the numbers that its description comes to; together they are 280 MiB."""
    with torch.device("meta"):
        model = build_seq2seq().model
    counts = {name: sum(each.numel() for each in part.parameters()) for name, part in model.named_children()}
    assert counts == {
        "encoder": 30_000 * 500 + 2 * 3 * 1000 * (500 + 1000 + 2),
        "keys": 2001 * 1000,
        "start": 1001 * 1000,
        "words": 30_000 * 500,
        "first": 3 * 1000 * (500 + 1000 + 2),
        "attention": 1000 * 1000 + 1001,
        "second": 3 * 1000 * (2000 + 1000 + 2),
        "readout": 3501 * 500,
        "logits": 501 * 30_000,
    }
    assert round(4 * sum(counts.values()) / 2**20) == 280


def test_the_optimizer_of_2018() -> None:
    """It fills gradients with zeros, where today's lets them go."""
    make = build_optimizer()
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = make([parameter])
    optimizer.zero_grad()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0, 0, 0]
    assert optimizer.param_groups[0]["foreach"] is False


def build_optimizer() -> type[torch.optim.Optimizer]:
    """What the workload brings."""
    with torch.device("meta"):
        make = build_seq2seq().optimizer
    assert isinstance(make, type)
    return make


def test_batches() -> None:
    """Sentences of one word, said over and over, on both sides."""
    with torch.device("meta"):
        workload = build_seq2seq()
    source, target = workload.make_batch(3, 4)
    assert source.tolist() == target.tolist() == [[2] * 4] * 3
