"""Tests of the sizes that requests are rounded to."""

from __future__ import annotations

import pytest

from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import block_size, segment_size
from batchfinder.units import KIB, MIB


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
