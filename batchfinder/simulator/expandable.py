"""Expandable segments: one long range of addresses per pool, with memory behind as much of it as is needed.

Functions named below are those of
https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp ("Note [Expandable Segments]").
"""

from __future__ import annotations

from bisect import insort

from batchfinder.simulator.blocks import Block, FreeList
from batchfinder.simulator.rounding import SMALL_SEGMENT_BYTES, round_up
from batchfinder.simulator.segments import Card, SegmentWatch
from batchfinder.simulator.settings import AllocatorSettings


class ExpandableSegments:
    """Ranges that grow and shrink by pages: 2 MiB in the small pool, `large_segment_bytes` (20 MiB) in the large one.

    Args:
        card: where pages come from.
        settings: of which `large_segment_bytes` is used.
        total_bytes: the card's whole memory, of which a range has 1 1/8 in addresses.
    """

    def __init__(self, card: Card, settings: AllocatorSettings, total_bytes: int) -> None:
        self._card = card
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
        block: Block | None = self._lowest_room(pool, size)
        if block is not None and not block.mapped:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            follower = block.next
            assert follower is not None  # _lowest_room has seen enough addresses
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

    def _lowest_room(self, pool: FreeList, size: int) -> Block:
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
        if not self._card.take(mapped):
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
        self._card.give_back(end - start)
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
