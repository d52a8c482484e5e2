"""The CUDA caching allocator, simulated: the same blocks, segments and counters for the same requests.

Every rule is stated where it is applied, after the function of
https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp that has it. The functions
were read in snapshots of that file from 2025; of 2.13.0 itself the headers were read and its settings parser was run.

Each stream has blocks and segments of its own: a block is cut from a segment of the stream that was current as it was
asked for, and when it is released only that stream can have it again (`get_free_block`, `free_block`): at once, or
where another stream has used it (`Tensor.record_stream`) when that one's work on it is done (`insert_events`,
`process_events`). When that is only a clock knows, so whoever calls says it. What is wholly free goes back to the card
whichever stream it is of.

Of free blocks of one size the one in the oldest segment is taken, and in a segment that at the lowest address; before
PyTorch 2.12 it was the one at the lowest address of all, and addresses are those that cudaMalloc was seen to give
(`CudaAddresses`). A test compares both with what PyTorch's own allocators do.

What is not modelled: private pools (CUDA graphs, `torch.cuda.MemPool`); memory callbacks and the garbage collector.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from itertools import chain

from batchfinder.simulator.alloc_conf import DEFAULT_SETTINGS, AllocatorSettings
from batchfinder.simulator.blocks import (
    ADDRESS_BITS,
    MIN_BLOCK_BYTES,
    SMALL_BLOCK_BYTES,
    Block,
    DeviceMemory,
    FreeList,
    SimulatedOutOfMemory,
    block_size,
    segment_size,
)
from batchfinder.simulator.segments import (
    CudaAddresses,
    CudaMallocSegments,
    ExpandableSegments,
    RisingAddresses,
    Segment,
    SegmentBlock,
    SegmentWatch,
    TakenMemory,
)

UNLIMITED = DeviceMemory(1 << 60, 1 << 60)


class CachingAllocator:
    """Hands out blocks of a simulated card's memory as `torch.cuda` would.

    Args:
        memory: the card; a number stands for a card of which the allocator may take all of that many bytes, None for
            one that is never full.

    Attributes:
        taken: what has been taken from the card; `reserved` and `max_reserved` read it.
        allocated: bytes in live blocks, `torch.cuda.memory_allocated`. A block counts with its own size, which is the
            request's rounded up, and more where what was left over was too little to split off.
        max_allocated: the most that `allocated` was since the start or `reset_peak`.
        num_alloc_retries: how often everything cached was released to try once more.

    Example:
        >>> allocator = CachingAllocator(64 << 20)
        >>> block = allocator.allocate(3_000_000)
        >>> allocator.allocated, allocator.reserved
        (3000320, 20971520)
    """

    def __init__(
        self,
        memory: DeviceMemory | int | None = None,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
    ) -> None:
        if memory is None:
            memory = UNLIMITED
        elif isinstance(memory, int):
            memory = DeviceMemory(memory, memory)
        self.memory = memory
        self.settings = settings
        self.allocated = 0
        self.max_allocated = 0
        self.num_alloc_retries = 0
        self.taken = TakenMemory(memory.usable_bytes)
        expandable = settings.expandable_segments
        self._segments: CudaMallocSegments | ExpandableSegments = (
            ExpandableSegments(self.taken, settings, memory.total_bytes)
            if expandable
            else CudaMallocSegments(
                self.taken,
                partial(segment_size, settings=settings),
                CudaAddresses() if settings.by_address else RisingAddresses(),
            )
        )
        self._pending: set[Block] = set()
        self._pools: dict[int, tuple[FreeList, FreeList]] = {}  # of small and large blocks, by stream
        self._default_pools = self._pools_of(0)
        self._rounds_to_divisions = any(divisions > 1 for divisions in settings.roundup_power2_divisions)
        self._plain = not expandable and settings.max_split_size_bytes is None

    @property
    def reserved(self) -> int:  # torch.cuda.memory_reserved
        return self.taken.current

    @property
    def requested(self) -> int:
        """Bytes that were asked for in live blocks, `requested_bytes.all.current`."""
        return sum(block.requested_bytes for segment in self.segments() for block in segment.blocks)

    @property
    def max_reserved(self) -> int:
        return self.taken.peak

    def _pools_of(self, stream: int) -> tuple[FreeList, FreeList]:
        if stream not in self._pools:
            small = FreeList(small=True, least_remainder=MIN_BLOCK_BYTES, stream=stream)
            # should_split: 512 B must be left over in the small pool and in expandable segments; otherwise more than
            # 1 MiB, of blocks that max_split_size_mb allows to be split.
            if self.settings.expandable_segments:
                large = FreeList(small=False, least_remainder=MIN_BLOCK_BYTES, stream=stream)
            else:
                unsplit_from = self.settings.max_split_size_bytes or 1 << 63
                large = FreeList(False, SMALL_BLOCK_BYTES + 1, unsplit_from, stream)
            self._pools[stream] = small, large
        return self._pools[stream]

    def allocate(self, nbytes: int, stream: int = 0) -> Block | None:
        """Hand out a block.

        Args:
            stream: the one that is current; 0 for the default stream.

        Returns:
            The block, to be handed to `free`. None for no bytes, which take nothing
            (`NativeCachingAllocator::allocate`).

        Raises:
            SimulatedOutOfMemory: the card is full, even after everything wholly free was released. The allocator can
                still be used.
        """
        if nbytes <= 0:
            return None
        # round_size
        size = block_size(nbytes, self.settings) if self._rounds_to_divisions else (nbytes + 511) & -512
        pools = self._pools_of(stream) if stream else self._default_pools
        pool = pools[size > SMALL_BLOCK_BYTES]  # get_pool
        keys = pool.keys
        index = bisect_left(keys, size << ADDRESS_BITS)  # get_free_block: best fit, then the oldest segment
        if index < len(keys) and (self._plain or (index := self._choose(pool, index, size)) >= 0):
            block = pool.blocks.pop(keys.pop(index))
        else:
            # malloc: take new memory, and when the card is full release what is cached and try again.
            segment, allowed = segment_size(size, self.settings), self.memory.allowed_bytes
            max_split = self.settings.max_split_size_bytes
            for first_release in (None, "oversize", "all"):
                if first_release == "oversize":
                    if max_split is None or not self._segments.release_oversize(pool, size, max_split):
                        continue
                elif first_release == "all":
                    self.empty_cache()
                    self.num_alloc_retries += 1  # alloc_block counts the try, not its success
                # alloc_block: under a memory fraction a whole segment must be allowed, even if fewer pages would do.
                if allowed is None or self.reserved + segment <= allowed:
                    grown = self._segments.grow(pool, size)
                    if grown is not None:
                        block = grown
                        break
            else:
                raise SimulatedOutOfMemory(nbytes, segment, self.memory, self.allocated, self.reserved)
        left = block.size - size
        if left >= pool.least_remainder and size < pool.unsplit_from:
            # alloc_found_block: the block keeps its lower part, the rest is free. The same as Block.cut, for speed.
            follower = block.next
            rest = Block(block.address + size, left, pool, block, follower)
            if follower is not None:
                follower.previous = rest
            block.next = rest
            block.size = size
            pool.add(rest)
        else:
            size += left
        block.free = False
        block.requested = nbytes
        self.allocated = allocated = self.allocated + size
        if allocated > self.max_allocated:
            self.max_allocated = allocated
        return block

    def free(self, block: Block | None) -> None:
        """Take a block back and merge it with free neighbours in its segment (`free_block`, `try_merge_blocks`).

        Raises:
            ValueError: the block is free already.
        """
        if block is None:
            return
        if block.free:
            raise ValueError(f"the block at {block.address:#x} was given back twice")
        self.allocated -= block.size
        pool = block.pool
        previous = block.previous
        if previous is not None and previous.free:
            pool.remove(previous)
            block.free = True  # so that giving it back again is noticed
            previous.absorb(block)
            block = previous
        follower = block.next
        if follower is not None and follower.free:
            pool.remove(follower)
            block.absorb(follower)
        pool.add(block)

    def request_free(self, block: Block | None) -> None:
        """Take a block back that another stream still uses: it is not allocated any more, but not free (`free`)."""
        if block is not None:
            self.allocated -= block.size
            self._pending.add(block)

    def is_pending(self, block: Block) -> bool:
        """Whether a block was taken back by `request_free` and is not free yet."""
        return block in self._pending

    def complete_free(self, block: Block | None) -> None:
        """Let a block be used again that `request_free` took back, if nothing else has done so (`process_events`)."""
        if block in self._pending:
            self._pending.remove(block)
            self.allocated += block.size
            self.free(block)

    def empty_cache(self) -> None:
        """Release everything wholly free, `torch.cuda.empty_cache`: unsplit segments, or whole pages.

        Other streams are waited for first (`synchronize_and_free_events`).
        """
        for block in list(self._pending):
            self.complete_free(block)
        for small, large in self._pools.values():
            self._segments.release(large)
            self._segments.release(small)

    def close(self) -> None:
        """Let go of all blocks. As each refers to its neighbours, they would stay until a garbage collection."""
        for pool in chain.from_iterable(self._pools.values()):
            pool.keys.clear()
            pool.blocks.clear()
        for head in self._segments.heads.values():
            block: Block | None = head
            while block is not None:
                follower, block.previous, block.next = block.next, None, None
                block = follower
        self._segments.heads.clear()
        self._pending.clear()

    def reset_peak(self) -> None:
        """Let the maxima start again from now, `torch.cuda.reset_peak_memory_stats`."""
        self.max_allocated = self.allocated
        self.taken.peak = self.taken.current

    def segments(self) -> tuple[Segment, ...]:
        """What has been taken from the card, by address, block by block; of a range, each part that is mapped."""
        ranges: list[list[Block]] = []
        for head in self._segments.heads.values():
            block: Block | None = head
            while block is not None:
                if block.mapped:
                    if block.previous is None or not block.previous.mapped:
                        ranges.append([])
                    ranges[-1].append(block)
                block = block.next
        return tuple(
            Segment(
                address=blocks[0].address,
                size_bytes=sum(block.size for block in blocks),
                small=blocks[0].pool.small,
                expandable=self.settings.expandable_segments,
                blocks=tuple(
                    SegmentBlock(
                        block.address,
                        block.size,
                        0 if block.free else block.requested,
                        block.free,
                        block in self._pending,
                    )
                    for block in blocks
                ),
                stream=blocks[0].pool.stream,
            )
            for blocks in sorted(ranges, key=lambda blocks: blocks[0].address)
        )

    def watch_segments(self, watch: SegmentWatch) -> None:
        """Call `watch` from now on for all that is taken from the card and given back to it."""
        self._segments.watch = watch

    def _choose(self, pool: FreeList, index: int, size: int) -> int:
        """The rest of get_free_block, for settings that have a say in it; -1 when no free block will do."""
        settings = self.settings
        if settings.expandable_segments:
            # Of blocks in order of size prefer one that could grow less. One before unmapped addresses counts as large
            # as it can grow, and the walk ends at the first that is no smaller.
            room = 0
            for place, key in enumerate(pool.keys[index:], index):
                block = pool.blocks[key]
                follower = block.next
                grown = block.size if follower is None or follower.mapped else block.size + follower.size
                if place > index and grown >= room:
                    break
                index, room = place, grown
        max_split = settings.max_split_size_bytes
        if max_split is not None:
            found = pool.blocks[pool.keys[index]].size
            if size < max_split <= found:
                return -1  # a small request does not get a block that may not be split
            if size >= max_split and found >= size + settings.max_non_split_rounding_bytes:
                return -1  # nor a large request one that is much too large
        return index
