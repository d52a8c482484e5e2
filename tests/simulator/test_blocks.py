"""Rounding, the card's memory and the message of an out-of-memory."""

from __future__ import annotations

import pytest

from batchfinder.errors import InvalidValue, OutOfMemory
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import DeviceMemory, SimulatedOutOfMemory, block_size, format_size, segment_size
from batchfinder.units import GIB, KIB, MIB


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (MIB + 1, MIB + 512)]
)
def test_requests_round_up_to_512_bytes(nbytes: int, expected: int) -> None:
    """A block is a multiple of 512 B, and at least one of them."""
    assert block_size(nbytes, AllocatorSettings()) == expected


@pytest.mark.parametrize(
    ("nbytes", "divisions", "expected"),
    [
        (1200 * KIB, 4, 1280 * KIB),  # between 1024 and 2048 in steps of 256
        (1280 * KIB, 4, 1280 * KIB),
        (1281 * KIB, 4, 1536 * KIB),
        (1793 * KIB, 4, 2048 * KIB),
        (2048 * KIB, 4, 2048 * KIB),
        (2048, 4, 2048),  # 512 B times the divisions: rounded to 512 B only
        (1537, 4, 2048),
        (1025, 4, 1536),
        (2049, 4, 2560),
        (1200 * KIB, 1, 1200 * KIB),
        (3 * MIB + 1, 2, 4 * MIB),
    ],
)
def test_divisions_round_up_to_parts_of_a_power_of_two(nbytes: int, divisions: int, expected: int) -> None:
    """Above 512 B times the divisions, a size goes up to the next of that many steps between two powers of two."""
    assert block_size(nbytes, AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (12 * MIB, 12 * MIB),
    ],
)
def test_segments_are_2_or_20_mib_or_made_to_measure(size: int, expected: int) -> None:
    """Up to 1 MiB takes 2 MiB, under 10 MiB takes 20 MiB, and from there on a multiple of 2 MiB."""
    assert segment_size(size, AllocatorSettings()) == expected


def test_large_segments_follow_their_setting() -> None:
    """`large_segment_size_mb` is what a large request under 10 MiB takes, and changes no other."""
    settings = AllocatorSettings(large_segment_bytes=12 * MIB)
    assert [segment_size(size, settings) for size in (MIB, MIB + 512, 10 * MIB)] == [2 * MIB, 12 * MIB, 10 * MIB]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 bytes"),
        (512, "512 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (MIB + 1, "1.00 MiB"),
        (20 * MIB, "20.00 MiB"),
        (GIB, "1024.00 MiB"),
        (GIB + 1, "1.00 GiB"),
        (2000 * GIB, "2000.00 GiB"),
    ],
)
def test_sizes_are_written_as_pytorch_writes_them(size: int, expected: str) -> None:
    """A unit's own size is written in the unit below it, and nothing is above GiB."""
    assert format_size(size) == expected


def test_message_is_pytorchs_with_the_card_called_simulated() -> None:
    """The whole text, with what the driver would say: the context counts as in use."""
    memory = DeviceMemory(total_bytes=12 * GIB, usable_bytes=12 * GIB - 500 * MIB)
    error = SimulatedOutOfMemory(3 * MIB, 20 * MIB, memory, 11 * GIB + 256 * MIB, 11 * GIB + 512 * MIB)
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 (simulated) has a total capacity of 12.00 GiB of which "
        "12.00 MiB is free. Including non-PyTorch memory, this process has 11.99 GiB memory in use. Of the allocated "
        "memory 11.25 GiB is allocated by PyTorch, and 256.00 MiB is reserved by PyTorch but unallocated. If reserved "
        "but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def test_message_names_the_memory_fraction() -> None:
    """Under a memory fraction the text says how much is allowed, before what is allocated."""
    memory = DeviceMemory(80 * GIB, 79 * GIB, allowed_bytes=12 * GIB)
    text = str(SimulatedOutOfMemory(GIB, GIB, memory, 11 * GIB + 1, 12 * GIB))
    assert "has 13.00 GiB memory in use. 12.00 GiB allowed; Of the allocated memory 11.00 GiB is allocated" in text
    assert memory.capacity_bytes == 12 * GIB
    assert DeviceMemory(80 * GIB, 11 * GIB, allowed_bytes=12 * GIB).capacity_bytes == 11 * GIB


def test_no_more_is_usable_than_there_is() -> None:
    """A card whose usable bytes exceed its total was mixed up by the caller."""
    with pytest.raises(InvalidValue, match="usable_bytes: invalid value 2; expected 0 to the card's 1"):
        DeviceMemory(1, 2)


def test_error_carries_its_figures_and_is_an_out_of_memory() -> None:
    """The fields are the figures of the text, and whoever catches `OutOfMemory` or `MemoryError` catches it."""
    error = SimulatedOutOfMemory(3 * KIB, 2 * MIB, DeviceMemory(16 * MIB, 10 * MIB), 7 * MIB, 9 * MIB)
    assert isinstance(error, OutOfMemory)
    assert isinstance(error, MemoryError)
    assert (error.requested_bytes, error.tried_bytes, error.free_bytes) == (3 * KIB, 2 * MIB, MIB)
    assert (error.total_bytes, error.allocated_bytes, error.reserved_bytes) == (16 * MIB, 7 * MIB, 9 * MIB)
    assert error.detail == str(error)
    assert error.batch_size is None
