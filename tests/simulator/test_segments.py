"""Tests of expandable segments, on cases worked out by hand."""

from __future__ import annotations

import pytest

from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.units import MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def take(allocator: CachingAllocator, nbytes: int) -> Block:
    """A block that is there."""
    block = allocator.allocate(nbytes)
    assert block is not None
    return block


def layout(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """For each mapped range, its blocks as MiB and whether they are free."""
    return [[(b.size_bytes // MIB, b.free) for b in segment.blocks] for segment in allocator.segments()]


def test_large_memory_is_mapped_in_pages_of_20_mib() -> None:
    """3 MiB map one page and 30 MiB more map what the free end of it lacks, in the same range."""
    allocator = CachingAllocator(None, EXPANDABLE)
    take(allocator, 3 * MIB)
    assert allocator.reserved == 20 * MIB
    take(allocator, 30 * MIB)
    assert allocator.reserved == 40 * MIB
    assert layout(allocator) == [[(3, False), (30, False), (7, True)]]
    assert allocator.segments()[0].expandable


def test_small_memory_is_mapped_in_pages_of_2_mib() -> None:
    """The small pool has a range of its own, whose pages are 2 MiB."""
    allocator = CachingAllocator(None, EXPANDABLE)
    for _ in range(3):
        take(allocator, MIB)
    assert allocator.reserved == 4 * MIB
    assert layout(allocator) == [[(1, False), (1, False), (1, False), (1, True)]]


def test_pages_follow_the_large_segment_size() -> None:
    """`large_segment_size_mb` is the page of the large pool."""
    settings = AllocatorSettings(expandable_segments=True, large_segment_bytes=12 * MIB)
    allocator = CachingAllocator(None, settings)
    take(allocator, 13 * MIB)
    assert allocator.reserved == 24 * MIB


def test_large_blocks_are_split_when_512_bytes_remain() -> None:
    """In expandable segments the large pool splits as finely as the small one."""
    allocator = CachingAllocator(None, EXPANDABLE)
    take(allocator, 20 * MIB - 512)
    assert allocator.allocated == 20 * MIB - 512
    assert [block.size_bytes for block in allocator.segments()[0].blocks] == [20 * MIB - 512, 512]


def test_only_whole_free_pages_are_released() -> None:
    """Of 60 MiB mapped with 3 MiB in use at the start, the first page stays, and what is free of it."""
    allocator = CachingAllocator(None, EXPANDABLE)
    kept, gone = take(allocator, 3 * MIB), take(allocator, 50 * MIB)
    allocator.free(gone)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    assert layout(allocator) == [[(3, False), (17, True)]]
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, ())


def test_a_hole_of_released_pages_parts_a_range_and_is_filled_first() -> None:
    """Pages released in the middle are mapped again before the range grows at its end."""
    allocator = CachingAllocator(None, EXPANDABLE)
    blocks = [take(allocator, 30 * MIB) for _ in range(3)]
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert allocator.reserved == 100 * MIB - 20 * MIB  # of 30 to 60 only the page from 40 to 60 is whole
    assert layout(allocator) == [[(30, False), (10, True)], [(30, False), (10, True)]]
    assert take(allocator, 30 * MIB).address == 30 * MIB
    assert allocator.reserved == 100 * MIB


def test_neighbouring_holes_become_one() -> None:
    """Pages released on both sides of a hole join it, and one request can fill all three."""
    allocator = CachingAllocator(None, EXPANDABLE)
    blocks = [take(allocator, 20 * MIB) for _ in range(5)]
    for i in (2, 1, 3):
        allocator.free(blocks[i])
        allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    assert take(allocator, 60 * MIB).address == 20 * MIB
    assert allocator.reserved == 100 * MIB


def test_a_block_that_could_grow_counts_as_large_as_it_can_get() -> None:
    """1.5 MiB go into a hole of 8 MiB rather than into the 2 MiB left at the end of the range."""
    allocator = CachingAllocator(None, EXPANDABLE)
    take(allocator, 5 * MIB)
    hole = take(allocator, 8 * MIB)
    take(allocator, 5 * MIB)
    allocator.free(hole)
    assert take(allocator, 3 * MIB // 2).address == 5 * MIB


def test_of_equal_holes_the_lower_address_is_taken() -> None:
    """The walk to blocks that could grow less does not pass on to one that is no smaller."""
    allocator = CachingAllocator(None, EXPANDABLE)
    blocks = [take(allocator, 4 * MIB) for _ in range(4)]
    allocator.free(blocks[2])
    allocator.free(blocks[0])
    assert take(allocator, 3 * MIB).address == 0


def test_a_range_released_from_both_ends_is_gone() -> None:
    """Pages released before and after one another leave no addresses behind, and the next block has new ones."""
    allocator = CachingAllocator(160 * MIB, EXPANDABLE)
    blocks = [take(allocator, 20 * MIB) for _ in range(3)]
    for i in (0, 2, 1):
        allocator.free(blocks[i])
        allocator.empty_cache()
    assert allocator.segments() == ()
    assert take(allocator, 20 * MIB).address == 180 * MIB


def test_a_full_card_is_tried_again_after_pages_were_released() -> None:
    """A page that is free in one pool is unmapped for the other."""
    allocator = CachingAllocator(21 * MIB, EXPANDABLE)
    allocator.free(take(allocator, 5 * MIB))
    take(allocator, MIB)
    assert (allocator.reserved, allocator.num_alloc_retries) == (2 * MIB, 1)


def test_released_pages_serve_a_block_at_other_addresses() -> None:
    """What a freed block gives back is mapped behind a larger one, for which its own addresses are too few."""
    allocator = CachingAllocator(80 * MIB, EXPANDABLE)
    first, _ = take(allocator, 20 * MIB), take(allocator, 20 * MIB)
    allocator.free(first)
    assert take(allocator, 60 * MIB).address == 40 * MIB
    assert (allocator.reserved, allocator.num_alloc_retries) == (80 * MIB, 1)


def with_two_holes(usable: int) -> CachingAllocator:
    """Five pages mapped, of which the first and the third were released, the second is free and two are in use."""
    allocator = CachingAllocator(usable, EXPANDABLE)
    blocks = [take(allocator, 20 * MIB) for _ in range(5)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    allocator.free(blocks[1])
    return allocator


def test_a_request_is_served_from_holes_and_what_is_free_between_them() -> None:
    """60 MiB are had by mapping two holes of a page around a free one, at the lowest addresses."""
    allocator = with_two_holes(100 * MIB)
    assert take(allocator, 60 * MIB).address == 0
    assert (allocator.reserved, allocator.num_alloc_retries) == (100 * MIB, 0)


def test_holes_are_mapped_one_after_the_other() -> None:
    """When the second hole finds the card full, the first has been mapped already, which the maximum shows."""
    allocator = with_two_holes(118 * MIB)
    for _ in range(20):
        take(allocator, MIB)
    allocator.reset_peak()
    with pytest.raises(SimulatedOutOfMemory):
        take(allocator, 60 * MIB)
    assert (allocator.max_reserved, allocator.reserved) == (100 * MIB, 60 * MIB)


def test_a_memory_fraction_counts_the_segment_not_the_pages() -> None:
    """Under a fraction 30 MiB must be allowed in full, although one more page of 20 MiB would do."""
    for allowed, fits in ((49, False), (50, True)):
        allocator = CachingAllocator(DeviceMemory(400 * MIB, 400 * MIB, allowed_bytes=allowed * MIB), EXPANDABLE)
        take(allocator, 3 * MIB)
        if fits:
            take(allocator, 30 * MIB)
            assert allocator.reserved == 40 * MIB
        else:
            with pytest.raises(SimulatedOutOfMemory):
                take(allocator, 30 * MIB)


def test_a_range_is_an_eighth_longer_than_the_card() -> None:
    """On a card of 160 MiB the addresses of a range end at 180 MiB, and a new range begins for what does not fit."""
    allocator = CachingAllocator(160 * MIB, EXPANDABLE)
    blocks = [take(allocator, 20 * MIB) for _ in range(8)]
    assert layout(allocator) == [[(20, False)] * 8]
    for i in (0, 2):
        allocator.free(blocks[i])
    allocator.empty_cache()
    assert take(allocator, 30 * MIB).address == 180 * MIB
    assert allocator.reserved == 160 * MIB


def test_a_card_without_memory_is_full() -> None:
    """A card of no bytes has no room for a page."""
    with pytest.raises(SimulatedOutOfMemory):
        take(CachingAllocator(0, EXPANDABLE), 1)


SPLIT_LIMIT = AllocatorSettings(expandable_segments=True, max_split_size_bytes=30 * MIB)


def test_the_split_limit_does_not_hold_at_the_end_of_a_range() -> None:
    """A free block over the limit is refused to a small request, which then gets it as the one that could grow."""
    allocator = CachingAllocator(None, SPLIT_LIMIT)
    allocator.free(take(allocator, 40 * MIB))
    assert take(allocator, 12 * MIB).address == 0
    assert allocator.reserved == 40 * MIB


def test_the_split_limit_holds_within_a_range() -> None:
    """A hole over the limit is not used, and on a full card it goes in the usual retry."""
    allocator = CachingAllocator(60 * MIB, SPLIT_LIMIT)
    hole, _ = take(allocator, 40 * MIB), take(allocator, 20 * MIB)
    allocator.free(hole)
    assert take(allocator, 12 * MIB).address == 0
    assert (allocator.reserved, allocator.num_alloc_retries) == (40 * MIB, 1)
