"""The caching allocator of PyTorch 0.4 and 1.0, whose sizes were others.

Source: `round_size` and `malloc` in
https://github.com/pytorch/pytorch/blob/v1.0.0/aten/src/THC/THCCachingAllocator.cpp (read in a copy of 2018). The rest
of its rules are today's: best fit, split if more than 1 MiB is left of a large block, merge free neighbours.
"""

from __future__ import annotations

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, FreeList
from batchfinder.simulator.memory import DeviceMemory
from batchfinder.simulator.rounding import SMALL_BLOCK_BYTES, round_up
from batchfinder.simulator.segments import CudaMallocSegments
from batchfinder.units import KIB, MIB

_LARGE_STEP_BYTES = 128 * KIB  # kRoundLarge
_SMALL_SEGMENT_BYTES = MIB  # kSmallAlloc


class Allocator2018(CachingAllocator):
    """Rounds large blocks to 128 KiB, where today's rounds to 512 B, and takes each large segment to measure.

    Args:
        memory: the card; None for one that is never full.
    """

    def __init__(self, memory: DeviceMemory | None = None) -> None:
        super().__init__(memory)
        self._segments = _Segments(self.card, self.settings)

    def allocate(self, nbytes: int) -> Block | None:
        """Hand out a block, as `CachingAllocator.allocate` does."""
        return super().allocate(nbytes if nbytes < SMALL_BLOCK_BYTES else round_up(nbytes, _LARGE_STEP_BYTES))


class _Segments(CudaMallocSegments):
    """1 MiB for small blocks; as large as the block for the others."""

    def grow(self, pool: FreeList, size: int) -> Block | None:
        """A new segment."""
        return self._take(pool, _SMALL_SEGMENT_BYTES if pool.small else size)
