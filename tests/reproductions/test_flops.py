"""The cost of checkpointing, against PyTorch's own count of a real step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification

from batchfinder.reproductions.titan_x import checkpointing_cost, forward_flops

FIGURES = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}


def counted(model: BertForSequenceClassification, batch_size: int, seq_len: int, backward: bool) -> int:
    """What PyTorch counts."""
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=torch.zeros(batch_size, dtype=torch.long)).loss
        if backward:
            loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("batch_size", "seq_len"), [(1, 16), (2, 40)])
def test_against_the_counter(batch_size: int, seq_len: int) -> None:
    """A forward, a step and a step with checkpointing take exactly what the formula says."""
    plain = BertForSequenceClassification(BertConfig(**FIGURES, attn_implementation="eager")).train()
    layers, rest = forward_flops(FIGURES, seq_len)
    assert counted(plain, batch_size, seq_len, backward=False) == batch_size * (layers + rest)
    step = counted(plain, batch_size, seq_len, backward=True)
    assert step == 3 * batch_size * (layers + rest)
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    cost = counted(checkpointed, batch_size, seq_len, backward=True) / step
    assert cost == pytest.approx(checkpointing_cost(FIGURES, seq_len), rel=1e-12)
    assert cost < 4 / 3
