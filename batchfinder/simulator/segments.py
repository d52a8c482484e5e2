"""Segments: taken one by one with cudaMalloc, or grown by pages in expandable ranges.

Functions named below are those of
https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp ("Note [Expandable Segments]").
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.blocks import ADDRESS_BITS, SMALL_SEGMENT_BYTES, Block, FreeList, round_up
from batchfinder.units import MIB

_BY_ADDRESS = attrgetter("address")

_TOP_ADDRESS = 1 << 52  # more than any step takes of a card that is never full; addresses below it are all positive
_RESERVATION_BYTES = 32 * MIB

SegmentWatch = Callable[[str, int, int, int], None]
"""Called with `alloc`, `free`, `map` or `unmap`, address, bytes and stream, once the card has given or got them."""


@dataclass(slots=True)
class TakenMemory:
    """What has been taken from the card, in bytes: `current` now, `peak` at most, of the `limit` there is."""

    limit: int
    current: int = 0
    peak: int = 0

    def take(self, nbytes: int) -> bool:
        """Take some bytes; False, and nothing is taken, when there are not as many."""
        if self.current + nbytes > self.limit:
            return False
        self.current += nbytes
        if self.current > self.peak:
            self.peak = self.current
        return True


class CudaAddresses:
    """Where cudaMalloc puts segments, which decides between free blocks of one size.

    NVIDIA does not say. Published memory snapshots show it: addresses are reserved in multiples of 32 MiB. A segment
    lies in the lowest gap of a reservation that is partly in use, else at the lower end of a new one, which is made at
    the upper end of the highest hole where it fits, as Linux' mmap does. A reservation with nothing in it becomes a
    hole.

    Two processes left nine snapshots that follow each other without a break, with 5,047 segments taken and 3,813 given
    back (memory_ctx*_forward_, *_fullstep_ and *_forward_mixed.pickle in `memory_files` of
    https://github.com/kkaitlyn111/cs336-a2-systems/tree/46eae3f8). Of 4,014 segments that came where addresses had
    been seen to be free, the rule names the place of 3,983; 1,033 came where something had been given back before the
    first snapshot begins. In other processes, segments that were taken before any was given back lie so in 96.5 to
    100 % of all pairs, as in `model_memory_usage/profile_grad.pkl` of
    https://github.com/shreyansh26/MLSys-Experiments; in one of ten, of seven segments, four fill a gap that was there
    before (https://github.com/a0kuma/pytorchMemoryViz/blob/main/tests/gpu_memory_snapshot-adam.pickle).

    What else a process maps, the driver itself among it, has no addresses here.
    """

    def __init__(self) -> None:
        self._lowest = _TOP_ADDRESS  # of all that was ever reserved
        self._starts: list[int] = []  # of the reservations
        self._reserved: dict[int, tuple[int, int]] = {}  # by their starts: their bytes, and those in use
        self._gaps: list[tuple[int, int]] = []  # within reservations: addresses and bytes
        self._holes: list[tuple[int, int]] = []  # between reservations
        self._widest_gap = 0  # at most

    def take(self, nbytes: int) -> int:
        """The address of a new segment."""
        if nbytes <= self._widest_gap:
            for number, (address, room) in enumerate(self._gaps):
                if room >= nbytes:
                    self._gaps[number : number + 1] = [(address + nbytes, room - nbytes)] if room > nbytes else []
                    self._use(address, nbytes)
                    return address
            self._widest_gap = nbytes - 1
        size = round_up(nbytes, _RESERVATION_BYTES)
        start = self._reserve(size)
        insort(self._starts, start)
        self._reserved[start] = size, nbytes
        if size > nbytes:
            self._add_gap(start + nbytes, size - nbytes)
        return start

    def give_back(self, address: int, nbytes: int) -> None:
        """A segment is no longer there."""
        start = self._use(address, -nbytes)
        size, used = self._reserved[start]
        if used:
            self._add_gap(address, nbytes)
            return
        del self._reserved[start]
        self._starts.remove(start)
        first, end = (bisect_left(self._gaps, (bound,)) for bound in (start, start + size))
        del self._gaps[first:end]
        _add_range(self._holes, start, size)

    def _reserve(self, nbytes: int) -> int:
        for number in reversed(range(len(self._holes))):
            start, room = self._holes[number]
            if room >= nbytes:
                self._holes[number : number + 1] = [(start, room - nbytes)] if room > nbytes else []
                return start + room - nbytes
        self._lowest -= nbytes
        return self._lowest

    def _use(self, address: int, nbytes: int) -> int:
        """Count bytes of a reservation as used; where it starts."""
        start = self._starts[bisect_right(self._starts, address) - 1]
        size, used = self._reserved[start]
        self._reserved[start] = size, used + nbytes
        return start

    def _add_gap(self, address: int, nbytes: int) -> None:
        start = self._starts[bisect_right(self._starts, address) - 1]
        width = _add_range(self._gaps, address, nbytes, start, start + self._reserved[start][0])
        self._widest_gap = max(self._widest_gap, width)


class RisingAddresses:
    """Each segment above all earlier ones, so that the order of addresses is that of age."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, nbytes: int) -> int:
        """The address of a new segment."""
        self._next += nbytes
        return self._next - nbytes

    def give_back(self, address: int, nbytes: int) -> None:
        """Addresses are not used again."""


def _add_range(
    ranges: list[tuple[int, int]], address: int, nbytes: int, lowest: int = 0, end: int = _TOP_ADDRESS
) -> int:
    """Put a range among others, with its neighbours between two bounds merged into it; the bytes of what results."""
    number = bisect_left(ranges, (address,))
    if number < len(ranges) and ranges[number][0] == address + nbytes < end:
        nbytes += ranges.pop(number)[1]
    if number and lowest <= ranges[number - 1][0] and sum(ranges[number - 1]) == address:
        number -= 1
        address, before = ranges.pop(number)
        nbytes += before
    ranges.insert(number, (address, nbytes))
    return nbytes


class CudaMallocSegments:
    """The default: one cudaMalloc per segment (`alloc_block`, `release_blocks`, `release_available_cached_blocks`).

    Args:
        segment_size: the bytes of the segment that a block of some size is cut from.
        addresses: where the segments lie.

    Attributes:
        heads: the first block of each segment, by address; it is the same object all its life.
        watch: called for all that is taken and given back; None for no one.
    """

    def __init__(
        self, taken: TakenMemory, segment_size: Callable[[int], int], addresses: CudaAddresses | RisingAddresses
    ) -> None:
        self._taken = taken
        self._segment_size = segment_size
        self._addresses = addresses
        self.heads: dict[int, Block] = {}
        self.watch: SegmentWatch | None = None

    def grow(self, pool: FreeList, size: int) -> Block | None:
        """A new segment for a block of `size` bytes, in no free list; None when the card is full."""
        nbytes = self._segment_size(size)
        if not self._taken.take(nbytes):
            return None
        block = Block(self._addresses.take(nbytes), nbytes, pool, None, None)
        self.heads[block.address] = block
        if self.watch is not None:
            self.watch("alloc", block.address, nbytes, pool.stream)
        return block

    def release(self, pool: FreeList) -> None:
        """Give back every segment that is one free block.

        A free block with a neighbour shares its segment with something in use, as free neighbours have merged.
        """
        for block in pool:
            if block.previous is None and block.next is None:
                self._give_back(block)

    def release_oversize(self, pool: FreeList, size: int, max_split: int) -> bool:
        """Give back the smallest segment that is large enough; else the largest ones until they are, together.

        Returns:
            Whether `size` bytes of blocks too large to be split are back.
        """
        wanted = max(size, max_split)
        index = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if index < len(pool.keys):
            self._give_back(pool.blocks[pool.keys[index]])
            return True
        released = 0
        while pool.keys and released < wanted and (block := pool.blocks[pool.keys[-1]]).size >= max_split:
            released += block.size
            self._give_back(block)
        return released >= wanted

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        del self.heads[block.address]
        self._addresses.give_back(block.address, block.size)
        self._taken.current -= block.size
        if self.watch is not None:
            self.watch("free", block.address, block.size, block.pool.stream)


class ExpandableSegments:
    """Ranges that grow and shrink by pages: 2 MiB in the small pool, `large_segment_bytes` in the large one.

    Args:
        total_bytes: the card's whole memory; a range has 1 1/8 times that in addresses.

    Attributes:
        heads: the first block of each range, by address.
        watch: called for all that is taken and given back; None for no one.
    """

    def __init__(self, taken: TakenMemory, settings: AllocatorSettings, total_bytes: int) -> None:
        self._taken = taken
        self._page = {True: SMALL_SEGMENT_BYTES, False: settings.large_segment_bytes}  # by whether the pool is small
        self._range_bytes = max(1, total_bytes + total_bytes // 8)  # the ExpandableSegment's constructor
        self._unmapped: dict[FreeList, list[Block]] = {}  # by address
        self._next_address = 0
        self.heads: dict[int, Block] = {}
        self.watch: SegmentWatch | None = None

    def grow(self, pool: FreeList, size: int) -> Block | None:
        """Map pages at the lowest addresses where `size` bytes can be had (`try_allocate_expandable_block`).

        Returns:
            A block in no free list; None when the card is full. What was mapped until then stays so, as free blocks.
        """
        page = self._page[pool.small]
        unmapped = self._unmapped.setdefault(pool, [])
        found: Block | None = None
        for candidate in unmapped:  # find_expandable_block: the first of enough in a row that are free or unmapped
            start = candidate.previous if candidate.previous is not None and candidate.previous.free else candidate
            room = 0
            following: Block | None = start
            while following is not None and room < size and (following.free or not following.mapped):
                room += following.size
                following = following.next
            if room >= size:
                found = start
                break
        if found is None:
            address = round_up(self._next_address, page)
            found = Block(address, round_up(self._range_bytes, page), pool, None, None)
            found.mapped = False
            self._next_address = address + found.size
            self.heads[address] = found
            unmapped.append(found)  # the highest address so far
        block = found
        while not block.mapped or block.size < size:  # map_block: put pages behind what is missing
            missing = size - block.size if block.mapped else size
            piece = block.next if block.mapped else block
            assert piece is not None  # enough addresses were found
            nbytes = round_up(min(piece.size, missing), page)
            if not self._taken.take(nbytes):
                return None
            if self.watch is not None:
                self.watch("map", piece.address, nbytes, pool.stream)
            unmapped.remove(piece)
            if nbytes < piece.size:
                insort(unmapped, piece.cut(nbytes), key=_BY_ADDRESS)
            piece.mapped = True
            if piece.previous is not None and piece.previous.free:
                pool.remove(piece.previous)
                piece.previous.absorb(piece)
                piece = piece.previous
            if piece.next is not None and piece.next.free:
                pool.remove(piece.next)
                piece.absorb(piece.next)
            pool.add(piece)
            block = piece
        pool.remove(block)
        return block

    def release(self, pool: FreeList) -> None:
        """Unmap the pages that lie wholly within free blocks (`release_blocks`, `unmap_block`)."""
        page = self._page[pool.small]
        for block in pool:
            start = round_up(block.address, page)
            end = (block.address + block.size) // page * page
            if start >= end:
                continue
            pool.remove(block)
            middle = block
            if start > block.address:
                middle = block.cut(start - block.address)
                pool.add(block)
            if middle.size > end - start:
                pool.add(middle.cut(end - start))
            middle.mapped = False
            self._taken.current -= end - start
            if self.watch is not None:
                self.watch("unmap", start, end - start, pool.stream)
            unmapped = self._unmapped[pool]
            if middle.next is not None and not middle.next.mapped:
                unmapped.remove(middle.next)
                middle.absorb(middle.next)
            if middle.previous is not None and not middle.previous.mapped:
                middle.previous.absorb(middle)
                middle = middle.previous
            else:
                insort(unmapped, middle, key=_BY_ADDRESS)
            if middle.previous is None and middle.next is None:  # release_expandable_segment
                unmapped.remove(middle)
                del self.heads[middle.address]

    def release_oversize(self, pool: FreeList, size: int, max_split: int) -> bool:
        """Never: `release_available_cached_blocks` passes expandable blocks over."""
        return False


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """One block of a segment, for reading.

    Attributes:
        requested_bytes: 0 when it is free.
        pending: whether it was released and waits for another stream.
    """

    address: int
    size_bytes: int
    requested_bytes: int
    free: bool
    pending: bool = False

    @property
    def state(self) -> str:
        """The block's state, as `torch.cuda.memory._snapshot()` names it."""
        return "inactive" if self.free else "active_pending_free" if self.pending else "active_allocated"


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous stretch of memory taken from the card, for reading (`DeviceCachingAllocator::snapshot`).

    Attributes:
        small: whether it belongs to the pool of blocks up to 1 MiB.
        stream: whose requests it serves.
        blocks: what it is made of, without gaps.
    """

    address: int
    size_bytes: int
    small: bool
    expandable: bool
    blocks: tuple[SegmentBlock, ...]
    stream: int = 0
