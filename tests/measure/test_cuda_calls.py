"""The calls to `torch.cuda`: PyTorch's own Python functions run, over a C layer that is made up.

It does what PyTorch's C++ does, as `DeviceCachingAllocator::setMemoryFraction` and its neighbours have it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from batchfinder.devices.device import memory_fraction
from batchfinder.measure.cuda_probe import CudaCard, gpu_facts
from batchfinder.measure.device_memory import CudaMemory

# Of this card 9 and 18 GiB are among the limits whose plain quotient comes to a byte less.
TOTAL = 150_754_820_096
LIMITS = (1, 1_000_000_007, 2 << 30, 9 << 30, TOTAL - 1)


class Layer:
    """One device."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self.allowed: int | None = None
        self.current = -1

    def set_fraction(self, fraction: float, device: int) -> None:
        assert device == 0
        assert 0 <= fraction <= 1
        self.allowed = int(fraction * self.total) if fraction < 1.0 else None

    def get_fraction(self, device: int) -> float:
        assert device == 0
        return 1.0 if self.allowed is None else self.allowed / self.total

    def set_device(self, device: int) -> None:
        self.current = device


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    """Under `torch.cuda`, for one test."""
    made = Layer()
    properties = SimpleNamespace(name="made up", total_memory=made.total, major=9, minor=0)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    for name, function in (
        ("_cuda_setMemoryFraction", made.set_fraction),
        ("_cuda_getMemoryFraction", made.get_fraction),
        ("_cuda_setDevice", made.set_device),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    return made


@example(total=TOTAL, limit=9 << 30)
@given(total=st.integers(1, 1 << 40), limit=st.integers(0, 1 << 40))
def test_a_fraction_comes_to_its_limit(total: int, limit: int) -> None:
    """To the byte, for any card; more than the card is the card."""
    fraction = memory_fraction(limit, total)
    assert 0.0 <= fraction <= 1.0
    assert int(fraction * total) == min(limit, total)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_set_and_taken_back(device: str, limit: int, layer: Layer) -> None:
    """With a number and without one; what was there before is there again, whole or not, however often."""
    card = CudaCard(torch.device(device))
    for before in (None, 18 << 30, 1_000_000_009):
        layer.allowed = before
        for _ in range(3):
            fraction = card.limit(limit)
            assert layer.allowed == limit
            card.restore(fraction)
            assert layer.allowed == before


@pytest.mark.parametrize("before", [None, 18 << 30, 1_000_000_009])
def test_tries_are_limited_within_what_was_set(before: int | None, layer: Layer) -> None:
    """The callback's and the loop's limit: what there is less the reserve, never more than before, and put back."""
    layer.allowed = before
    memory = CudaMemory(torch.device("cuda", 0), None)
    assert memory.allowance_bytes == (TOTAL if before is None else before)
    for reserve in (0, 1_000_003):
        with memory.limited(reserve, 0):
            assert (layer.allowed or TOTAL) == memory.allowance_bytes - reserve
        assert layer.allowed == before


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_card_is_looked_at_by_any_name(device: str, layer: Layer) -> None:
    """`cuda` is what a sweep asks for where no card is named."""
    facts = gpu_facts(torch.device(device))
    assert (facts["name"], facts["total_bytes"], facts["compute_capability"]) == ("made up", TOTAL, [9, 0])
    assert layer.current == 0
