"""Segments as cudaMalloc gives them: each one a piece of its own, returned only when all of it is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from batchfinder.simulator.blocks import Block, FreeList
from batchfinder.simulator.rounding import segment_size
from batchfinder.simulator.settings import AllocatorSettings

SegmentWatch = Callable[[str, int, int], None]
"""Called with `alloc`, `free`, `map` or `unmap`, the address and the bytes, once the card has given or got them."""


class Card:
    """How much of the card's memory is taken.

    Attributes:
        usable: bytes there are to take.
        taken: bytes taken now.
        peak: the most that was taken at one time.
    """

    __slots__ = ("peak", "taken", "usable")

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self.taken = 0
        self.peak = 0

    def take(self, nbytes: int) -> bool:
        """Take some bytes; False, and nothing is taken, when there are not as many."""
        if self.taken + nbytes > self.usable:
            return False
        self.taken += nbytes
        if self.taken > self.peak:
            self.peak = self.taken
        return True

    def give_back(self, nbytes: int) -> None:
        """Return some bytes."""
        self.taken -= nbytes


class SegmentSource(Protocol):
    """Where blocks come from when no free one will do.

    Attributes:
        watch: told of all that is taken and given back; None for nobody.
    """

    watch: SegmentWatch | None

    @property
    def heads(self) -> list[Block]:
        """The first block of each segment."""
        ...

    def fit(self, pool: FreeList, index: int) -> int:
        """The index of the block to prefer, given the best fitting one."""
        ...

    def grow(self, pool: FreeList, size: int) -> Block | None:
        """A block of at least `size` bytes in no free list; None when the card is full."""
        ...

    def release(self, pool: FreeList) -> None:
        """Give the card back what is wholly free."""
        ...

    def release_oversize(self, pool: FreeList, size: int, max_split: int) -> bool:
        """Give back free blocks too large to be split, until `size` bytes are back; whether there were enough."""
        ...


class CudaMallocSegments:
    """The default: one cudaMalloc per segment (`alloc_block`, `release_blocks`, `release_available_cached_blocks`)."""

    def __init__(self, card: Card, settings: AllocatorSettings) -> None:
        self._card = card
        self._settings = settings
        self._heads: dict[int, Block] = {}  # by address; the first block of a segment is the same object all its life
        self._next_address = 0
        self.watch: SegmentWatch | None = None

    @property
    def heads(self) -> list[Block]:
        """The first block of each segment."""
        return list(self._heads.values())

    def fit(self, pool: FreeList, index: int) -> int:
        """The best fitting block is the one to take."""
        return index

    def grow(self, pool: FreeList, size: int) -> Block | None:
        """A new segment."""
        return self._take(pool, segment_size(size, self._settings))

    def _take(self, pool: FreeList, nbytes: int) -> Block | None:
        if not self._card.take(nbytes):
            return None
        block = Block(self._next_address, nbytes, pool, None, None)
        self._heads[block.address] = block
        self._next_address += nbytes
        if self.watch is not None:
            self.watch("alloc", block.address, nbytes)
        return block

    def release(self, pool: FreeList) -> None:
        """Give back every segment that is one free block.

        A free block with a neighbour shares its segment with something in use, as free neighbours have merged.
        """
        for block in [block for block in pool.blocks if block.previous is None and block.next is None]:
            self._give_back(block)

    def release_oversize(self, pool: FreeList, size: int, max_split: int) -> bool:
        """Give back the smallest segment that is large enough; else the largest ones until they are, together."""
        wanted = max(size, max_split)
        index = pool.first_at_least(wanted)
        if index < len(pool.blocks):
            self._give_back(pool.blocks[index])
            return True
        released = 0
        while pool.blocks and released < wanted and pool.blocks[-1].size >= max_split:
            released += pool.blocks[-1].size
            self._give_back(pool.blocks[-1])
        return released >= wanted

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        del self._heads[block.address]
        self._card.give_back(block.size)
        if self.watch is not None:
            self.watch("free", block.address, block.size)


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """One block of a segment, for reading.

    Attributes:
        address: where it starts.
        size_bytes: its length.
        requested_bytes: what was asked for; 0 when it is free.
        free: whether it can be handed out.
    """

    address: int
    size_bytes: int
    requested_bytes: int
    free: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous stretch of memory taken from the card, for reading (`DeviceCachingAllocator::snapshot`).

    Attributes:
        address: where it starts.
        size_bytes: its length.
        small: whether it belongs to the pool of blocks up to 1 MiB.
        expandable: whether it can grow.
        blocks: what it is made of, without gaps.
    """

    address: int
    size_bytes: int
    small: bool
    expandable: bool
    blocks: tuple[SegmentBlock, ...]


def describe(heads: list[Block], expandable: bool) -> tuple[Segment, ...]:
    """The segments by address; of an expandable one, each range that memory is behind."""
    ranges: list[list[Block]] = []
    for head in heads:
        block: Block | None = head
        while block is not None:
            if block.mapped:
                starts = block.previous is None or not block.previous.mapped
                if starts:
                    ranges.append([])
                ranges[-1].append(block)
            block = block.next
    return tuple(
        Segment(
            address=blocks[0].address,
            size_bytes=sum(block.size for block in blocks),
            small=blocks[0].pool.small,
            expandable=expandable,
            blocks=tuple(SegmentBlock(block.address, block.size, block.requested, block.free) for block in blocks),
        )
        for blocks in sorted(ranges, key=lambda blocks: blocks[0].address)
    )
