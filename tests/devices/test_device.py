"""Devices, budgets and the memory fraction."""

from __future__ import annotations

import pytest

from batchfinder.devices import (
    DEFAULT_COMPUTE_CAPABILITY,
    Device,
    all_gpus,
    device_for,
    device_with_budget,
    find_gpu,
)
from batchfinder.devices.catalog import NVLINK_COMMUNICATOR_BYTES, memory_fraction
from batchfinder.errors import InvalidValue
from batchfinder.units import GIB, MIB


def test_whole_card() -> None:
    """A card's device has its total, its usable bytes, its compute capability and its context."""
    gpu = find_gpu("V100")
    whole = device_for(gpu)
    nccl = NVLINK_COMMUNICATOR_BYTES
    assert whole == Device(
        "V100 16GB",
        gpu.memory_bytes,
        gpu.usable_bytes,
        (7, 0),
        False,
        gpu.context_bytes,
        communicator_bytes=nccl,
        multiprocessors=80,
    )
    assert whole.reduces_on == (80, 2048)
    assert whole.usable_bytes + whole.context_bytes == whole.total_bytes


def test_every_card_makes_a_device() -> None:
    """Every card can be simulated; those without a compute capability take the default."""
    for gpu in all_gpus():
        assert 0 < device_for(gpu).usable_bytes < device_for(gpu).total_bytes
    assert device_for(find_gpu("MI300X")).compute_capability == DEFAULT_COMPUTE_CAPABILITY


def test_budget_alone() -> None:
    """Without a card the allocator has all of the budget, and the name says how much."""
    assert device_with_budget(12 * GIB) == Device("12.00 GiB budget", 12 * GIB, 12 * GIB, (8, 0), True)


def test_budget_on_a_larger_card() -> None:
    """On a larger card the allocator has the budget in full: the context is outside it."""
    device = device_with_budget(12 * GIB, find_gpu("H100"))
    assert (device.total_bytes, device.usable_bytes) == (12 * GIB, 12 * GIB)
    assert device.compute_capability == (9, 0)
    assert device.name == "H100 80GB, 12.00 GiB budget"
    assert device.context_bytes == find_gpu("H100").context_bytes


def test_budget_between_usable_and_total() -> None:
    """A budget that the context leaves no room for gives what the card has left."""
    gpu = find_gpu("H100")
    device = device_with_budget(gpu.memory_bytes - 1, gpu)
    assert device.usable_bytes == gpu.usable_bytes
    assert device.total_bytes == gpu.memory_bytes - 1


def test_budget_beyond_the_card() -> None:
    """A budget larger than the card changes no figure of it, and its name says so."""
    gpu = find_gpu("T4")
    device = device_with_budget(100 * GIB, gpu)
    assert device.name == "T4, 100.00 GiB budget (more than it has)"
    assert (device.total_bytes, device.usable_bytes) == (gpu.memory_bytes, gpu.usable_bytes)


def test_among_others_nccl_takes_memory() -> None:
    """One of several GPUs has less by what NCCL takes of it, which a budget leaves room for or does not.

    On a card without NVLink there are fewer channels. A budget that is on no card in particular is all the allocator's.
    """
    for name, taken in (("A100 80GB", 688 * MIB), ("RTX 4090", 688 * MIB // 12)):
        alone = device_for(find_gpu(name))
        assert alone.among_others(2).usable_bytes == alone.usable_bytes - 2 * taken
        assert alone.among_others(2).context_bytes == alone.context_bytes + 2 * taken
        assert alone.among_others(0) == alone
    gpu = find_gpu("A100 80GB")
    assert device_with_budget(40 * GIB, gpu).among_others(1).usable_bytes == 40 * GIB
    tight = device_with_budget(gpu.usable_bytes - 88 * MIB, gpu)
    assert tight.among_others(1).usable_bytes == gpu.usable_bytes - 688 * MIB
    assert device_with_budget(GIB).among_others(1) == device_with_budget(GIB)


@pytest.mark.parametrize("budget_bytes", [0, -1])
def test_budget_must_be_positive(budget_bytes: int) -> None:
    """A budget of nothing is refused."""
    with pytest.raises(InvalidValue):
        device_with_budget(budget_bytes)


def test_fraction() -> None:
    """The fraction is of the device's total, and at most all of it."""
    assert memory_fraction(12 * GIB, 48 * GIB) == 0.25
    assert memory_fraction(12 * GIB, 8 * GIB) == 1.0
