"""The memory of 8-bit AdamW's states."""

from __future__ import annotations

import torch
from torch import nn

from batchfinder.reproductions.models import AdamW8bitStates


def stepped(model: nn.Module) -> AdamW8bitStates:
    """An optimizer after one step."""
    optimizer = AdamW8bitStates(model.parameters())
    model(torch.zeros(1, 100)).sum().backward()
    optimizer.step()
    return optimizer


def test_states() -> None:
    """Two bytes a number and two fp32 scales for each block of 256, begun blocks too; small parameters keep fp32."""
    model = nn.Linear(100, 41)
    optimizer = stepped(model)
    assert state_bytes(optimizer, model.weight) == 2 * 4100 + 2 * 4 * 17
    assert state_bytes(optimizer, model.bias) == 2 * 4 * 41
    exactly_4096 = nn.Parameter(torch.zeros(16, 256))
    exactly_4096.grad = torch.zeros(16, 256)
    one = AdamW8bitStates([exactly_4096])
    one.step()
    assert state_bytes(one, exactly_4096) == 2 * 4096 + 2 * 4 * 16


def test_a_second_step_takes_nothing_more() -> None:
    """The states are made once, and for parameters with gradients only."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    model[1].requires_grad_(False)
    optimizer = stepped(model)
    before = {name: id(value) for name, value in optimizer.state[model[0].weight].items()}
    optimizer.step()
    assert {name: id(value) for name, value in optimizer.state[model[0].weight].items()} == before
    assert model[1].weight not in optimizer.state


def state_bytes(optimizer: AdamW8bitStates, parameter: torch.Tensor) -> int:
    """Of one parameter."""
    return sum(value.nbytes for value in optimizer.state[parameter].values())
