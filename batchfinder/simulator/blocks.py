"""A block of device memory, and the sorted list of the free ones."""

from __future__ import annotations

from bisect import bisect_left

ADDRESS_BITS = 64


class Block:
    """A stretch of a segment: in use, free, or (in an expandable segment) not backed by memory.

    The blocks of a segment are a chain in the order of their addresses.

    Attributes:
        address: where it starts, in bytes.
        size: its length in bytes.
        pool: the free list it goes to.
        previous: the block before it in its segment.
        next: the block after it in its segment.
        requested: bytes that were asked for; 0 when it is not in use.
        free: whether it can be handed out.
        mapped: whether memory is behind it. A block that is not mapped is not free.
        key: its place in the free list, while it is free.
    """

    __slots__ = ("address", "free", "key", "mapped", "next", "pool", "previous", "requested", "size")

    def __init__(self, address: int, size: int, pool: FreeList, previous: Block | None, next: Block | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.previous = previous
        self.next = next
        self.requested = 0
        self.free = False
        self.mapped = True
        self.key = 0

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


class FreeList:
    """The free blocks of one pool, smallest first, the lower address first among equals (`BlockComparatorSize`).

    Attributes:
        small: whether this is the pool of blocks up to 1 MiB.
        least_remainder: a block is split when at least this many bytes are left over,
        unsplit_from: and when the size that is needed is under this.
        keys: the order of `blocks`, for bisection.
        blocks: the free blocks.
    """

    __slots__ = ("blocks", "keys", "least_remainder", "small", "unsplit_from")

    def __init__(self, small: bool, least_remainder: int, unsplit_from: int = 1 << 63) -> None:
        self.small = small
        self.least_remainder = least_remainder
        self.unsplit_from = unsplit_from
        self.keys: list[int] = []
        self.blocks: list[Block] = []

    def first_at_least(self, size: int) -> int:
        """The index of the smallest block that holds `size` bytes; the number of blocks if there is none."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def take(self, index: int) -> Block:
        """Remove and return the block at an index."""
        del self.keys[index]
        block = self.blocks.pop(index)
        block.free = False
        return block

    def add(self, block: Block) -> None:
        """Put a block among the free ones."""
        block.key = key = (block.size << ADDRESS_BITS) + block.address
        block.free = True
        keys = self.keys
        index = bisect_left(keys, key)
        keys.insert(index, key)
        self.blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        """Take a certain block out, before it changes its size."""
        index = bisect_left(self.keys, block.key)
        del self.keys[index]
        del self.blocks[index]
        block.free = False
