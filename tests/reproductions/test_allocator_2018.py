"""The allocator of PyTorch 1.0."""

from __future__ import annotations

import pytest

from batchfinder.reproductions.seq2seq import Allocator2018
from batchfinder.simulator.blocks import DeviceMemory, SimulatedOutOfMemory
from batchfinder.units import KIB, MIB


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, MIB),
        (MIB - 1, MIB, MIB),
        (MIB, MIB, MIB),
        (MIB + 1, MIB + 128 * KIB, MIB + 128 * KIB),
        (16_000_000, 16_121_856, 16_121_856),
        (128 * MIB, 128 * MIB, 128 * MIB),
    ],
)
def test_rounding(asked: int, allocated: int, reserved: int) -> None:
    """Small blocks in steps of 512 B from segments of 1 MiB, large ones in steps of 128 KiB from their own."""
    allocator = Allocator2018()
    allocator.allocate(asked)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_remainder_of_one_mib_is_not_split_off() -> None:
    """A large block counts whole where no more than 1 MiB is left over, and is shared where more is."""
    for left, allocated in ((MIB, 5 * MIB), (MIB + 128 * KIB, 5 * MIB - MIB - 128 * KIB)):
        allocator = Allocator2018()
        allocator.free(allocator.allocate(5 * MIB))
        allocator.allocate(5 * MIB - left)
        assert (allocator.allocated, allocator.reserved) == (allocated, 5 * MIB)


def test_the_cache_goes_back_before_it_fails() -> None:
    """A full card makes it free what is cached and try once more."""
    allocator = Allocator2018(DeviceMemory(8 * MIB, 8 * MIB))
    allocator.free(allocator.allocate(5 * MIB))
    allocator.allocate(6 * MIB)
    assert (allocator.num_alloc_retries, allocator.reserved, allocator.max_reserved) == (1, 6 * MIB, 6 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.allocate(3 * MIB)
