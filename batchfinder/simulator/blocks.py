"""Blocks of simulated device memory: how requests are rounded to blocks and segments, free lists, a card's capacity.

Facts from https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp (functions named below) and
its constants in https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/AllocatorConfig.h.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from batchfinder.errors import InvalidValue, OutOfMemory
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.units import GIB, KIB, MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BLOCK_BYTES = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_BLOCK_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment is made to measure
SEGMENT_STEP_BYTES = 2 * MIB  # kRoundLarge


def round_up(nbytes: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-nbytes // step) * step


def block_size(nbytes: int, settings: AllocatorSettings) -> int:
    """The size that is looked for when `nbytes` are asked for; `round_size`, `roundup_power2_next_division`."""
    divisions = settings.divisions(nbytes)
    if divisions <= 1 or nbytes <= MIN_BLOCK_BYTES * divisions:
        return round_up(nbytes, MIN_BLOCK_BYTES)
    power = 1 << (nbytes.bit_length() - 1)
    return round_up(nbytes, power // divisions)


def segment_size(size: int, settings: AllocatorSettings) -> int:
    """The bytes taken from the device for a block when none is free; `get_allocation_size`."""
    if size <= SMALL_BLOCK_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LARGE_BLOCK_BYTES:
        return settings.large_segment_bytes
    return round_up(size, SEGMENT_STEP_BYTES)


ADDRESS_BITS = 64


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A stretch of a segment: in use, free, or (in an expandable segment) not backed by memory.

    The blocks of a segment are a chain in the order of their addresses.

    Attributes:
        pool: the free list it goes to.
        requested: bytes that were asked for; 0 when it is not in use.
        mapped: whether memory is behind it. A block that is not mapped is not free.
        key: its place in the free list, while it is free.
    """

    address: int
    size: int
    pool: FreeList
    previous: Block | None
    next: Block | None
    requested: int = 0
    free: bool = False
    mapped: bool = True
    key: int = 0

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes and return the rest as a new block, with memory behind it if this one has."""
        rest = Block(self.address + size, self.size - size, self.pool, self, self.next)
        rest.mapped = self.mapped
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb(self, follower: Block) -> None:
        """Take over the block that comes next, which is in no list."""
        self.size += follower.size
        self.next = follower.next
        if follower.next is not None:
            follower.next.previous = self


@dataclass(slots=True, eq=False, repr=False)
class FreeList:
    """The free blocks of one pool and stream, smallest first, the lower address first among equals.

    PyTorch has one set for all streams of a pool, in the order of their streams first (`BlockComparatorSize`), and ends
    its search at the first block of another one (`get_free_block`).

    Attributes:
        small: whether this is the pool of blocks up to 1 MiB.
        least_remainder: a block is split when at least this many bytes are left over,
        unsplit_from: and when the size that is needed is under this.
        stream: whose blocks these are.
        keys: of the blocks, in order.
        blocks: by key.
    """

    small: bool
    least_remainder: int
    unsplit_from: int = 1 << 63
    stream: int = 0
    keys: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Block]:
        """The blocks there are now, in order; they may be taken out meanwhile."""
        return map(self.blocks.__getitem__, tuple(self.keys))

    def add(self, block: Block) -> None:
        block.key = key = (block.size << ADDRESS_BITS) + block.address
        block.free = True
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Take a certain block out, before it changes its size."""
        key = block.key
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]
        block.free = False


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a card has and what of it the allocator may take.

    Attributes:
        total_bytes: what the driver reports.
        usable_bytes: what is left of it for the allocator: without the context, libraries and other processes.
        allowed_bytes: the limit that `torch.cuda.set_per_process_memory_fraction` sets on the allocator; None if unset.

    Raises:
        InvalidValue: more is usable than there is.
    """

    total_bytes: int
    usable_bytes: int
    allowed_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.usable_bytes <= self.total_bytes:
            raise InvalidValue("usable_bytes", self.usable_bytes, f"0 to the card's {self.total_bytes}")

    @property
    def capacity_bytes(self) -> int:
        """The most the allocator can have reserved at one time."""
        return self.usable_bytes if self.allowed_bytes is None else min(self.usable_bytes, self.allowed_bytes)


class SimulatedOutOfMemory(OutOfMemory):
    """The simulated card is full, and stayed so after its cached segments had been released.

    Attributes:
        tried_bytes: the segment that this needed; the figure in the message, as in PyTorch's.
        free_bytes, total_bytes: as the driver would report them.
    """

    def __init__(
        self, requested_bytes: int, tried_bytes: int, memory: DeviceMemory, allocated_bytes: int, reserved_bytes: int
    ) -> None:
        self.requested_bytes = requested_bytes
        self.tried_bytes = tried_bytes
        self.free_bytes = memory.usable_bytes - reserved_bytes
        self.total_bytes = memory.total_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        in_use = format_size(self.total_bytes - self.free_bytes)
        allowed = "" if memory.allowed_bytes is None else f"{format_size(memory.allowed_bytes)} allowed; "
        # The text of DeviceCachingAllocator::malloc, with the card called simulated. Sentences that other code looks
        # for stay whole; PYTORCH_ALLOC_CONF is named as torch 2.10 and later do; the double blanks are PyTorch's own.
        message = (
            f"CUDA out of memory. Tried to allocate {format_size(self.tried_bytes)}. "
            f"GPU 0 (simulated) has a total capacity of {format_size(self.total_bytes)} "
            f"of which {format_size(self.free_bytes)} is free. "
            f"Including non-PyTorch memory, this process has {in_use} memory in use. {allowed}"
            f"Of the allocated memory {format_size(self.allocated_bytes)} is allocated by PyTorch, "
            f"and {format_size(self.reserved_bytes - self.allocated_bytes)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
            "to avoid fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )
        super().__init__(None, message)
        self.args = (message,)  # the device's words alone: they may be raised again as torch.OutOfMemoryError


def format_size(size: int) -> str:
    """Write bytes exactly as PyTorch's messages do: a unit's own size still belongs to the unit below it.

    `c10::CachingAllocator::format_size`, https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/Allocator.h.
    `batchfinder.units.format_bytes` differs at whole units: 1 GiB is `1024.00 MiB` here, and 512 B is `512 bytes`.
    """
    if size <= KIB:
        return f"{size} bytes"
    for limit, factor, unit in ((MIB, KIB, "KiB"), (GIB, MIB, "MiB")):
        if size <= limit:
            return f"{size / factor:.2f} {unit}"
    return f"{size / GIB:.2f} GiB"
