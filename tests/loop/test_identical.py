"""Training after sizes were tried is bit for bit the training without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from batchfinder import tune_batch_size
from tests.loop import loops
from tests.snapshot.state_digest import Digester, differences


def train(loop: Any, batch_size: int, accumulation: int) -> dict[str, Any]:
    """Six optimizer steps; everything that came of them."""
    for _ in range(6):
        micro_batches = [loop.make_batch(batch_size, None) for _ in range(accumulation)]
        loop.train_step(micro_batches if accumulation > 1 else micro_batches[0])
    model, optimizer, scheduler, average, losses = loop.state
    return {
        "losses": list(losses),
        "tensors": {name: value.numpy().tobytes() for name, value in (*_tensors(model), *average.shadow.items())},
        "optimizer": repr(optimizer.state_dict()),
        "scheduler": repr(copy.deepcopy(scheduler.state_dict())),
        "random": torch.rand(1).item(),
    }


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, value.detach()) for name, value in (*model.named_parameters(), *model.named_buffers())]


@pytest.mark.parametrize("target", [None, 6], ids=["plain", "accumulated"])
@pytest.mark.parametrize("net", loops.NETS)
def test_losses_and_weights_are_those_of_a_loop_without_it(net: str, target: int | None) -> None:
    """Six steps after the search and six without one agree in each bit: losses, weights, buffers, average, schedule."""
    accumulation = 1 if target is None else 2
    plain = train(loops.make_loop(net, accumulate=target is not None), 3, accumulation)
    loop = loops.make_loop(net, most=3, accumulate=target is not None)
    found = tune_batch_size(
        loop.train_step, loop.make_batch, loop.state, target_batch_size=target, max_batch_size=8, tolerance=0
    )
    assert (found.batch_size, found.accumulation) == (3, accumulation)
    assert train(loop, found.batch_size, found.accumulation) == plain


@pytest.mark.parametrize(
    ("net", "goal"),
    [
        *((net, "memory") for net in loops.NETS),
        pytest.param(next(iter(loops.NETS)), "throughput", marks=pytest.mark.slow),
    ],
)
def test_every_object_is_as_it_was(net: str, goal: str) -> None:
    """In the middle of training too, with gradients alive: each object in reach holds what it held, and the process."""
    loop = loops.make_loop(net, most=3)
    train(loop, 2, 1)
    model = loop.model
    loss = model(loop.make_batch(2, None)[0]).sum()
    loss.backward()
    list(model.parameters())[-1].grad = None
    digest = Digester(keep=True)
    before = digest(state=loop.state, step=loop.train_step)
    found = tune_batch_size(loop.train_step, loop.make_batch, loop.state, goal=goal, max_batch_size=8, tolerance=0)
    assert (found.result.max_batch_size, found.tuning.timings > 0) == (3, goal == "throughput")
    assert differences(digest(state=loop.state, step=loop.train_step), before) == []
