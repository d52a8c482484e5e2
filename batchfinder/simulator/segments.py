"""Segments: taken one by one with cudaMalloc, or grown by pages in expandable ranges.

Functions named below are those of
https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp ("Note [Expandable Segments]").
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import SMALL_SEGMENT_BYTES, Block, FreeList, round_up, segment_size

SegmentWatch = Callable[[str, int, int], None]
"""Called with `alloc`, `free`, `map` or `unmap`, the address and the bytes, once the card has given or got them."""


class TakenMemory:
    """What has been taken from the card, in bytes.

    Attributes:
        limit: the most there is to take.
        current: taken now.
        peak: the most that was taken at one time.
    """

    __slots__ = ("current", "limit", "peak")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.current = 0
        self.peak = 0

    def take(self, nbytes: int) -> bool:
        """Take some bytes; False, and nothing is taken, when there are not as many."""
        if self.current + nbytes > self.limit:
            return False
        self.current += nbytes
        if self.current > self.peak:
            self.peak = self.current
        return True

    def give_back(self, nbytes: int) -> None:
        """Return some bytes."""
        self.current -= nbytes


class SegmentSource(Protocol):
    """Where blocks come from when no free one will do.

    Attributes:
        watch: called for all that is taken and given back; None for no one.
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

    def __init__(self, taken: TakenMemory, settings: AllocatorSettings) -> None:
        self._taken = taken
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
        if not self._taken.take(nbytes):
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
        self._taken.give_back(block.size)
        if self.watch is not None:
            self.watch("free", block.address, block.size)


class ExpandableSegments:
    """Ranges that grow and shrink by pages: 2 MiB in the small pool, `large_segment_bytes` in the large one.

    Args:
        total_bytes: the card's whole memory; a range has 1 1/8 times that in addresses.
    """

    def __init__(self, taken: TakenMemory, settings: AllocatorSettings, total_bytes: int) -> None:
        self._taken = taken
        self._large_page = settings.large_segment_bytes
        self._range_bytes = max(1, total_bytes + total_bytes // 8)  # the ExpandableSegment's constructor
        self._heads: dict[int, Block] = {}
        self._unmapped: dict[FreeList, list[Block]] = {}  # by address
        self._next_address = 0
        self.watch: SegmentWatch | None = None

    @property
    def heads(self) -> list[Block]:
        """The first block of each range."""
        return list(self._heads.values())

    def fit(self, pool: FreeList, index: int) -> int:
        """Prefer, among blocks in order of size, one that could grow less (`get_free_block`).

        A block before unmapped addresses counts as large as it can grow. The walk ends at the first that is no smaller.
        """
        blocks = pool.blocks
        room = _room(blocks[index])
        while index + 1 < len(blocks) and (next_room := _room(blocks[index + 1])) < room:
            index += 1
            room = next_room
        return index

    def grow(self, pool: FreeList, size: int) -> Block | None:
        """Map pages at the lowest addresses where `size` bytes can be had (`try_allocate_expandable_block`).

        What was mapped before the card turned out to be full stays mapped, as free blocks.
        """
        block: Block | None = self._lowest_fit(pool, size)
        if block is not None and not block.mapped:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            follower = block.next
            assert follower is not None  # _lowest_fit has seen enough addresses
            block = self._map(follower, min(size - block.size, follower.size))
        if block is not None:
            pool.remove(block)
        return block

    def release(self, pool: FreeList) -> None:
        """Unmap the pages that lie wholly within free blocks (`release_blocks`, `unmap_block`)."""
        for block in list(pool.blocks):
            self._unmap(block)

    def release_oversize(self, pool: FreeList, size: int, max_split: int) -> bool:
        """Never: `release_available_cached_blocks` passes expandable blocks over."""
        return False

    def _page(self, pool: FreeList) -> int:
        return SMALL_SEGMENT_BYTES if pool.small else self._large_page

    def _lowest_fit(self, pool: FreeList, size: int) -> Block:
        """The first of enough blocks in a row that are free or unmapped (`find_expandable_block`)."""
        unmapped = self._unmapped.setdefault(pool, [])
        for block in unmapped:
            start = block.previous if block.previous is not None and block.previous.free else block
            if _has_room(start, size):
                return start
        page = self._page(pool)
        address = round_up(self._next_address, page)
        block = Block(address, round_up(self._range_bytes, page), pool, None, None)
        block.mapped = False
        self._next_address = address + block.size
        self._heads[address] = block
        unmapped.append(block)  # the highest address so far
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Put pages behind the first `size` bytes (`map_block`); None when the card has not as many."""
        pool = block.pool
        mapped = round_up(size, self._page(pool))
        if not self._taken.take(mapped):
            return None
        if self.watch is not None:
            self.watch("map", block.address, mapped)
        unmapped = self._unmapped[pool]
        unmapped.remove(block)
        if mapped < block.size:
            insort(unmapped, block.cut(mapped), key=_address)
        block.mapped = True
        if block.previous is not None and block.previous.free:
            pool.remove(block.previous)
            block.previous.absorb(block)
            block = block.previous
        if block.next is not None and block.next.free:
            pool.remove(block.next)
            block.absorb(block.next)
        pool.add(block)
        return block

    def _unmap(self, block: Block) -> None:
        pool = block.pool
        page = self._page(pool)
        start = round_up(block.address, page)
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            middle = block.cut(start - block.address)
            pool.add(block)
        else:
            middle = block
        if middle.size > end - start:
            pool.add(middle.cut(end - start))
        middle.mapped = False
        self._taken.give_back(end - start)
        if self.watch is not None:
            self.watch("unmap", start, end - start)
        unmapped = self._unmapped[pool]
        if middle.next is not None and not middle.next.mapped:
            unmapped.remove(middle.next)
            middle.absorb(middle.next)
        if middle.previous is not None and not middle.previous.mapped:
            middle.previous.absorb(middle)
            middle = middle.previous
        else:
            insort(unmapped, middle, key=_address)
        if middle.previous is None and middle.next is None:  # release_expandable_segment
            unmapped.remove(middle)
            del self._heads[middle.address]


def _address(block: Block) -> int:
    return block.address


def _has_room(start: Block, size: int) -> bool:
    room = 0
    block: Block | None = start
    while block is not None and room < size and (block.free or not block.mapped):
        room += block.size
        block = block.next
    return room >= size


def _room(block: Block) -> int:
    follower = block.next
    return block.size if follower is None or follower.mapped else block.size + follower.size


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """One block of a segment, for reading.

    Attributes:
        requested_bytes: what was asked for; 0 when it is free.
    """

    address: int
    size_bytes: int
    requested_bytes: int
    free: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous stretch of memory taken from the card, for reading (`DeviceCachingAllocator::snapshot`).

    Attributes:
        small: whether it belongs to the pool of blocks up to 1 MiB.
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
