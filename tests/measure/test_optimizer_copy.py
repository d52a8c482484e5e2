"""All that a step changes is put back in place, from copies on the device or on the host; a change is seen without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchfinder.measure.optimizer_copy import OptimizerCopy, bits_of, memory_of


def trained():
    """A net and its optimizer after one step, with the gradients of the next."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(torch.rand(4, 3)).sum().backward()
    return model, optimizer


def held(model, optimizer):
    """What there is, by object and by value."""
    parameters = list(model.parameters())
    tensors = [*parameters, *(parameter.grad for parameter in parameters)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [(id(tensor), tensor.data_ptr(), tensor.tolist()) for tensor in tensors]


@pytest.mark.parametrize("place", ["device", "host", "file"])
def test_in_place(place):
    """The same tensors hold the same again, in the same memory; groups and state have what they had."""
    model, optimizer = trained()
    before, groups = held(model, optimizer), [dict(group) for group in optimizer.param_groups]
    saved = OptimizerCopy(optimizer, host=place == "host")
    if place == "file":
        saved.make_room()
    weight, values = model[0].weight, sum(parameter.numel() for parameter in model.parameters())
    for _ in range(2):  # as often as it is asked to
        optimizer.step()
        weight.data = torch.zeros(7)
        weight.grad = None
        optimizer.state[model[1].bias].clear()
        optimizer.param_groups[0]["lr"] = 5
        optimizer.param_groups[0]["more"] = 1
        optimizer.added = 2
        assert saved.nbytes == 4 * (4 * values + len(groups[0]["params"]))  # with gradients, two moments and steps
        assert (saved._file is not None) == (place == "file")
        assert saved.restore()
        saved.make_room() if place == "file" else None
        assert held(model, optimizer) == before
        assert [dict(group) for group in optimizer.param_groups] == groups
        assert not hasattr(optimizer, "added")


def test_without_copies():
    """Without copies, containers are put back if no tensor has changed; else nothing is, and that is said."""
    model, optimizer = trained()
    saved = OptimizerCopy(optimizer, contents=False)
    assert saved.nbytes == 0
    optimizer.param_groups[0]["lr"] = 5
    assert saved.restore()
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.param_groups[0]["lr"] = 5
    for tensor in (model[0].weight, model[1].bias.grad, optimizer.state[model[0].bias]["exp_avg"]):
        before = tensor.detach().clone()
        tensor.data.view(-1)[0] += 1e-6  # through .data, which raises no version
        assert not saved.restore()
        assert optimizer.param_groups[0]["lr"] == 5
        tensor.data.copy_(before)
    assert saved.restore()


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]),
    st.integers(0, 71),
    st.integers(0, 7),
)
def test_bits(values, dtype, byte, bit):
    """One bit that changes anywhere in a tensor's memory is seen, whatever the type and size."""
    memory = memory_of(torch.tensor(values).nan_to_num(0, 1, -1).clamp(-99, 99).to(dtype))
    before = int(bits_of(memory))
    assert int(bits_of(memory)) == before
    memory[byte % len(memory)] ^= 1 << bit
    assert int(bits_of(memory)) != before


def test_bits_of_equal_values():
    """Weights that are all alike are seen to change alike."""
    tensor = torch.ones(64)
    before = int(bits_of(memory_of(tensor)))
    tensor.mul_(0.999)
    assert int(bits_of(memory_of(tensor))) != before
