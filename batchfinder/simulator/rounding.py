"""How a request becomes a block and a block a segment: the sizes the caching allocator rounds to.

Facts from https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp (functions named below) and
its constants in https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h.
"""

from __future__ import annotations

from batchfinder.simulator.settings import AllocatorSettings
from batchfinder.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BLOCK_BYTES = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_BLOCK_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment is made to measure
SEGMENT_STEP_BYTES = 2 * MIB  # kRoundLarge


def round_up(nbytes: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-nbytes // step) * step


def block_size(nbytes: int, settings: AllocatorSettings) -> int:
    """The size that is looked for when `nbytes` are asked for; `round_size`, `roundup_power2_next_division`.

    Args:
        nbytes: the request, at least 1.
        settings: whose `roundup_power2_divisions` apply to requests of more than 512 B times their number.
    """
    divisions = settings.divisions(nbytes)
    if divisions <= 1 or nbytes <= MIN_BLOCK_BYTES * divisions:
        return round_up(nbytes, MIN_BLOCK_BYTES)
    power = 1 << (nbytes.bit_length() - 1)
    return round_up(nbytes, power // divisions)


def segment_size(size: int, settings: AllocatorSettings) -> int:
    """The bytes taken from the device for a block when none is free; `get_allocation_size`.

    Args:
        size: the block's size, already rounded.
        settings: whose `large_segment_bytes` serve large blocks under 10 MiB.
    """
    if size <= SMALL_BLOCK_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LARGE_BLOCK_BYTES:
        return settings.large_segment_bytes
    return round_up(size, SEGMENT_STEP_BYTES)
