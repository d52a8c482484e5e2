"""Tests of the allocator's rules, one at a time, on cases worked out by hand."""

from __future__ import annotations

import gc

import pytest

from batchfinder.simulator.alloc_conf import BEFORE_2_12, AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.simulator.segments import CudaAddresses
from batchfinder.units import KIB, MIB


def take(allocator: CachingAllocator, nbytes: int) -> Block:
    """A block that is there."""
    block = allocator.allocate(nbytes)
    assert block is not None
    return block


def free_sizes(allocator: CachingAllocator) -> list[int]:
    """The free blocks' sizes by address."""
    return [block.size_bytes for segment in allocator.segments() for block in segment.blocks if block.free]


def test_blocks_count_with_their_own_size() -> None:
    """`allocated` counts the rounded sizes and `requested` the requests."""
    allocator = CachingAllocator()
    take(allocator, 1)
    block = take(allocator, 513)
    assert (allocator.allocated, allocator.requested) == (512 + 1024, 514)
    allocator.free(block)
    assert (allocator.allocated, allocator.requested) == (512, 1)


def test_no_bytes_take_nothing() -> None:
    """An empty tensor has no block, and giving that back is nothing either."""
    allocator = CachingAllocator(0)
    assert allocator.allocate(0) is None
    allocator.free(None)
    assert (allocator.allocated, allocator.reserved, allocator.segments()) == (0, 0, ())


@pytest.mark.parametrize(
    ("nbytes", "reserved"), [(MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB - 511, 10), (10 * MIB + 1, 12)]
)
def test_a_first_block_takes_its_segment(nbytes: int, reserved: int) -> None:
    """The segment is chosen by the rounded size: 2 MiB, 20 MiB, or the next multiple of 2 MiB."""
    allocator = CachingAllocator()
    take(allocator, nbytes)
    assert allocator.reserved == reserved * MIB


def test_small_blocks_are_split_when_512_bytes_remain() -> None:
    """Exactly 512 B left over in the small pool become a free block of their own."""
    allocator = CachingAllocator()
    take(allocator, MIB)
    take(allocator, MIB - 512)
    assert allocator.allocated == 2 * MIB - 512
    assert free_sizes(allocator) == [512]


def test_large_blocks_are_not_split_when_1_mib_remains() -> None:
    """Exactly 1 MiB left over in the large pool stays with the block, which counts as a whole."""
    allocator = CachingAllocator()
    take(allocator, 9 * MIB)
    block = take(allocator, 10 * MIB)
    assert (block.size, allocator.allocated) == (11 * MIB, 20 * MIB)
    assert free_sizes(allocator) == []


def test_large_blocks_are_split_when_more_than_1_mib_remains() -> None:
    """One step of 512 B more than 1 MiB is split off."""
    allocator = CachingAllocator()
    take(allocator, 9 * MIB)
    take(allocator, 10 * MIB - 512)
    assert allocator.allocated == 19 * MIB - 512
    assert free_sizes(allocator) == [MIB + 512]


def test_the_smallest_free_block_is_taken() -> None:
    """The best fit wins over a larger one in an older segment."""
    allocator = CachingAllocator()
    large, small = take(allocator, 26 * MIB), take(allocator, 12 * MIB)
    allocator.free(small)
    allocator.free(large)
    assert take(allocator, 12 * MIB).address == small.address


@pytest.mark.parametrize(("settings", "taken"), [(AllocatorSettings(), 0), (BEFORE_2_12, 1)])
def test_of_equal_free_blocks_the_one_in_the_oldest_segment_is_taken(settings: AllocatorSettings, taken: int) -> None:
    """Before 2.12 that at the lowest address, where the younger one lies. In which order they were freed is nothing."""
    for order in ((0, 1), (1, 0)):
        allocator = CachingAllocator(settings=settings)
        blocks = [take(allocator, 20 * MIB), take(allocator, 20 * MIB)]
        for i in order:
            allocator.free(blocks[i])
        assert take(allocator, 20 * MIB).address == blocks[taken].address


def test_a_segment_that_is_taken_again_is_young() -> None:
    """Age is counted from the last cudaMalloc."""
    allocator = CachingAllocator()
    first, second = take(allocator, 12 * MIB), take(allocator, 12 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    third = take(allocator, 12 * MIB)
    allocator.free(second)
    allocator.free(third)
    assert take(allocator, 12 * MIB).address == second.address


def test_free_neighbours_merge_on_both_sides() -> None:
    """A block freed between two free ones makes one of the three."""
    allocator = CachingAllocator()
    blocks = [take(allocator, 512 * KIB) for _ in range(3)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    assert free_sizes(allocator) == [512 * KIB, MIB]
    allocator.free(blocks[1])
    assert free_sizes(allocator) == [2 * MIB]


def test_neighbours_in_use_do_not_merge() -> None:
    """Freeing one of three leaves the others as they are."""
    allocator = CachingAllocator()
    blocks = [take(allocator, 512 * KIB) for _ in range(4)]
    allocator.free(blocks[1])
    assert free_sizes(allocator) == [512 * KIB]
    assert allocator.allocated == 1536 * KIB


def test_segments_do_not_merge() -> None:
    """Two free segments side by side serve no request that needs both."""
    allocator = CachingAllocator()
    blocks = [take(allocator, 12 * MIB), take(allocator, 12 * MIB)]
    for block in blocks:
        allocator.free(block)
    take(allocator, 24 * MIB)
    assert allocator.reserved == 48 * MIB


def test_pools_do_not_lend_to_each_other() -> None:
    """A small request does not come from a large free block, nor does a small segment grow."""
    allocator = CachingAllocator()
    allocator.free(take(allocator, 5 * MIB))
    take(allocator, MIB)
    assert allocator.reserved == 22 * MIB
    assert [segment.small for segment in allocator.segments()] == [False, True]


def test_freed_memory_stays_reserved() -> None:
    """What is freed is cached and serves the next request of its size."""
    allocator = CachingAllocator()
    allocator.free(take(allocator, 12 * MIB))
    assert (allocator.allocated, allocator.reserved) == (0, 12 * MIB)
    take(allocator, 12 * MIB)
    assert allocator.reserved == 12 * MIB


def test_a_full_card_is_tried_again_after_the_cache_was_released() -> None:
    """A wholly free segment is given back for one that does not fit beside it."""
    allocator = CachingAllocator(24 * MIB)
    allocator.free(take(allocator, 12 * MIB))
    take(allocator, 14 * MIB)
    assert (allocator.reserved, allocator.max_reserved, allocator.num_alloc_retries) == (14 * MIB, 14 * MIB, 1)


def test_both_pools_are_released() -> None:
    """A large request on a full card releases cached small segments too."""
    allocator = CachingAllocator(12 * MIB)
    allocator.free(take(allocator, 512))
    take(allocator, 12 * MIB)
    assert allocator.reserved == 12 * MIB


def test_segments_partly_in_use_are_not_released() -> None:
    """On a full card the free part of a segment is of no use to a larger request."""
    allocator = CachingAllocator(40 * MIB)
    first = take(allocator, 5 * MIB)
    take(allocator, 5 * MIB)
    allocator.free(first)
    with pytest.raises(SimulatedOutOfMemory) as caught:
        take(allocator, 22 * MIB)
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (5 * MIB, 20 * MIB)
    assert caught.value.free_bytes == 20 * MIB
    assert allocator.reserved == 20 * MIB


def test_the_last_byte_of_the_card_can_be_taken() -> None:
    """A card of exactly the segment's size is enough, 1 B less is not."""
    take(CachingAllocator(12 * MIB), 12 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        take(CachingAllocator(12 * MIB - 1), 12 * MIB)


def test_the_message_names_the_segment_not_the_request() -> None:
    """3 MiB that would need a new segment are reported as the 20 MiB that were tried, as PyTorch does."""
    allocator = CachingAllocator(19 * MIB)
    with pytest.raises(SimulatedOutOfMemory, match=r"Tried to allocate 20\.00 MiB\.") as caught:
        take(allocator, 3 * MIB)
    assert (caught.value.requested_bytes, caught.value.tried_bytes) == (3 * MIB, 20 * MIB)


def test_a_failed_request_changes_no_block_and_counts_as_a_retry() -> None:
    """After running out of memory the allocator goes on as before, with the cache released."""
    allocator = CachingAllocator(26 * MIB)
    kept = take(allocator, 12 * MIB)
    allocator.free(take(allocator, 10 * MIB))
    with pytest.raises(SimulatedOutOfMemory):
        take(allocator, 16 * MIB)
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (12 * MIB, 12 * MIB, 12 * MIB)
    assert (allocator.max_allocated, allocator.num_alloc_retries) == (22 * MIB, 1)
    take(allocator, 14 * MIB)
    allocator.free(kept)
    assert allocator.allocated == 14 * MIB


def test_maxima_hold_until_they_are_reset() -> None:
    """The maxima stay when memory is freed and released, and a reset makes them what is held now."""
    allocator = CachingAllocator()
    kept, gone = take(allocator, 12 * MIB), take(allocator, 14 * MIB)
    allocator.free(gone)
    allocator.empty_cache()
    assert (allocator.max_allocated, allocator.max_reserved) == (26 * MIB, 26 * MIB)
    assert (allocator.allocated, allocator.reserved, allocator.num_alloc_retries) == (12 * MIB, 12 * MIB, 0)
    allocator.free(take(allocator, 1))
    assert (allocator.max_allocated, allocator.max_reserved) == (26 * MIB, 26 * MIB)
    allocator.empty_cache()
    allocator.reset_peak()
    assert (allocator.max_allocated, allocator.max_reserved) == (12 * MIB, 12 * MIB)
    allocator.free(kept)
    assert allocator.max_allocated == 12 * MIB


def test_a_block_given_back_twice_is_noticed() -> None:
    """Freeing a block again is an error, also when it has merged with its neighbours meanwhile."""
    allocator = CachingAllocator()
    first, second = take(allocator, 512), take(allocator, 512)
    allocator.free(first)
    allocator.free(second)
    for block in (first, second):
        with pytest.raises(ValueError, match="was given back twice"):
            allocator.free(block)


def test_a_memory_fraction_limits_the_allocator_alone() -> None:
    """What is allowed counts the allocator's segments only, and the card's own limit still holds."""
    fraction = CachingAllocator(DeviceMemory(100 * MIB, 50 * MIB, allowed_bytes=20 * MIB))
    take(fraction, 20 * MIB)
    with pytest.raises(SimulatedOutOfMemory, match=r"20\.00 MiB allowed; ") as caught:
        take(fraction, 1)
    assert caught.value.free_bytes == 30 * MIB
    for memory in (DeviceMemory(100 * MIB, 18 * MIB, 20 * MIB), DeviceMemory(100 * MIB, 100 * MIB, 19 * MIB)):
        with pytest.raises(SimulatedOutOfMemory):
            take(CachingAllocator(memory), 3 * MIB)  # whose segment is 20 MiB


def test_divisions_round_what_is_allocated() -> None:
    """17 MiB count and take 24 MiB with two divisions and 20 MiB with four."""
    for divisions, size in ((2, 24 * MIB), (4, 20 * MIB)):
        allocator = CachingAllocator(None, AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}"))
        take(allocator, 17 * MIB)
        assert (allocator.allocated, allocator.reserved) == (size, size)


MAX_SPLIT = AllocatorSettings(max_split_size_bytes=30 * MIB)


def test_oversize_blocks_do_not_serve_small_requests() -> None:
    """A free block of the limit's size is passed over by a request under the limit, even if nothing else is free."""
    for size, reserved in ((30 * MIB, 42 * MIB), (28 * MIB, 28 * MIB)):
        allocator = CachingAllocator(None, MAX_SPLIT)
        allocator.free(take(allocator, size))
        take(allocator, 12 * MIB)
        assert allocator.reserved == reserved


def test_oversize_requests_do_not_split() -> None:
    """A request of the limit's size keeps the whole block, one under it leaves the rest."""
    allocator = CachingAllocator(None, MAX_SPLIT)
    allocator.free(take(allocator, 34 * MIB))
    assert take(allocator, 30 * MIB).size == 34 * MIB
    allocator = CachingAllocator(None, MAX_SPLIT)
    allocator.free(take(allocator, 28 * MIB))
    assert take(allocator, 26 * MIB).size == 26 * MIB


def test_oversize_requests_do_not_waste_20_mib() -> None:
    """A block that is 20 MiB larger than an oversize request is not used for it; one of 2 MiB less is."""
    for size, reserved in ((50 * MIB, 80 * MIB), (48 * MIB, 48 * MIB)):
        allocator = CachingAllocator(None, MAX_SPLIT)
        allocator.free(take(allocator, size))
        take(allocator, 30 * MIB)
        assert allocator.reserved == reserved


def test_the_waste_of_oversize_requests_has_its_setting() -> None:
    """With `max_non_split_rounding_mb` of 22, a block 20 MiB larger than the request serves it."""
    allocator = CachingAllocator(None, AllocatorSettings.parse("max_split_size_mb:30,max_non_split_rounding_mb:22"))
    allocator.free(take(allocator, 50 * MIB))
    take(allocator, 30 * MIB)
    assert allocator.reserved == 50 * MIB


def test_the_smallest_oversize_block_that_suffices_is_released_first() -> None:
    """On a full card one oversize block is given back before the whole cache, which stays, and it is no retry."""
    allocator = CachingAllocator(144 * MIB, MAX_SPLIT)
    for block in [take(allocator, size * MIB) for size in (60, 70, 14)]:
        allocator.free(block)
    take(allocator, 32 * MIB)
    assert (allocator.reserved, allocator.num_alloc_retries) == ((70 + 14 + 32) * MIB, 0)


def test_several_oversize_blocks_are_released_largest_first() -> None:
    """When no single one suffices they go from the largest down until the request's size is back."""
    allocator = CachingAllocator(114 * MIB, MAX_SPLIT)
    for block in [take(allocator, size * MIB) for size in (30, 32, 38, 14)]:
        allocator.free(block)
    take(allocator, 70 * MIB)
    assert (allocator.reserved, allocator.num_alloc_retries) == ((30 + 14 + 70) * MIB, 0)


def test_too_few_oversize_blocks_lead_to_the_usual_retry() -> None:
    """When all oversize blocks together are too little, everything cached is released."""
    allocator = CachingAllocator(46 * MIB, MAX_SPLIT)
    for block in [take(allocator, size * MIB) for size in (30, 14)]:
        allocator.free(block)
    take(allocator, 40 * MIB)
    assert (allocator.reserved, allocator.num_alloc_retries) == (40 * MIB, 1)


def test_oversize_blocks_must_add_up_to_the_request_by_themselves() -> None:
    """56 MiB free on the card and 30 MiB released would hold 70 MiB, but the whole cache goes first."""
    allocator = CachingAllocator(100 * MIB, MAX_SPLIT)
    for block in [take(allocator, size * MIB) for size in (30, 14)]:
        allocator.free(block)
    take(allocator, 70 * MIB)
    assert (allocator.reserved, allocator.num_alloc_retries) == (70 * MIB, 1)


# In the order in which they were taken, in MiB: size, and how far above the first one. From memory snapshots of CUDA
# cards: https://github.com/shreyansh26/MLSys-Experiments/blob/main/model_memory_usage/profile_grad.pkl (its first four)
# and memory_files/memory_ctx128_forward_mixed.pickle of https://github.com/kkaitlyn111/cs336-a2-systems/tree/46eae3f8.
PLACES = (
    [(1908, 0), (2, 1908), (192, -192), (954, -1152)],
    [(50, 0), (10, 50), (50, -64), (10, -14), (50, -128), (14, -78)],
)


@pytest.mark.parametrize("places", PLACES)
def test_segments_lie_as_in_real_snapshots(places: list[tuple[int, int]]) -> None:
    """A segment lies in the lowest gap that 32 MiB of addresses leave, or below all others."""
    allocator = CachingAllocator(settings=BEFORE_2_12)
    addresses = [take(allocator, size * MIB if size > 2 else 200_000).address for size, _ in places]
    assert [(address - addresses[0]) // MIB for address in addresses] == [place for _, place in places]


def test_addresses_are_used_again() -> None:
    """Of a reservation that is partly in use the lowest gap, else the highest hole, from its upper end down.

    `CudaAddresses` says in which snapshots it was seen.
    """
    addresses = CudaAddresses()
    first = addresses.take(20 * MIB)
    tail = addresses.take(10 * MIB)
    middle, last = addresses.take(20 * MIB), addresses.take(90 * MIB)
    assert [(at - first) // MIB for at in (tail, middle, last)] == [20, -32, -128]
    addresses.give_back(first, 20 * MIB)  # its reservation has 10 MiB in use
    addresses.give_back(last, 90 * MIB)  # a hole of 96
    assert addresses.take(16 * MIB) == first
    assert [(addresses.take(20 * MIB) - first) // MIB for _ in range(2)] == [-64, -96]
    assert (addresses.take(4 * MIB) - first) // MIB == -76  # 12 MiB are left of each, 4 beside the first
    assert (addresses.take(40 * MIB) - first) // MIB == -192  # 32 MiB of the hole are left, and it lies below them
    assert (addresses.take(30 * MIB) - first) // MIB == -128
    for place, size in ((first, 16), (tail, 10)):
        addresses.give_back(place, size * MIB)
    assert addresses.take(32 * MIB) == first  # the reservation was empty, and no gap is left of it
    addresses.give_back(middle, 20 * MIB)
    assert addresses.take(32 * MIB) == middle


def test_the_highest_hole_is_taken_and_neighbours_are_one() -> None:
    """Of two reservations that were given back the upper one is taken first; two side by side have room for both."""
    addresses = CudaAddresses()
    first, second, third, fourth = (addresses.take(32 * MIB) for _ in range(4))
    for place in (fourth, second):
        addresses.give_back(place, 32 * MIB)
    assert [addresses.take(32 * MIB) for _ in range(2)] == [second, fourth]
    for place in (third, second):
        addresses.give_back(place, 32 * MIB)
    assert addresses.take(64 * MIB) == third
    assert first - third == 64 * MIB


def test_addresses_suffice_on_an_unlimited_card() -> None:
    """Beyond a pebibyte, too, a free block is found by its size."""
    allocator = CachingAllocator()
    blocks = [take(allocator, 1 << 48) for _ in range(5)]
    allocator.free(blocks[-1])
    assert take(allocator, 1 << 48).address == blocks[-1].address > 0


def test_segments_are_described_block_by_block() -> None:
    """A segment shows its address, its size, its pool and its blocks with what was asked for."""
    allocator = CachingAllocator()
    start = take(allocator, 12 * MIB).address
    take(allocator, 700)
    large, small = allocator.segments()
    assert (large.address, large.size_bytes, large.small, large.expandable) == (start, 12 * MIB, False, False)
    assert (small.address, small.size_bytes, small.small) == (start + 12 * MIB, 2 * MIB, True)
    assert [(b.address, b.size_bytes, b.requested_bytes, b.free) for b in small.blocks] == [
        (start + 12 * MIB, 1024, 700, False),
        (start + 12 * MIB + 1024, 2 * MIB - 1024, 0, True),
    ]


def test_a_free_block_has_nothing_requested_of_it() -> None:
    """What was asked for is forgotten when the block is freed."""
    allocator = CachingAllocator()
    allocator.free(take(allocator, 11 * MIB))
    assert [(block.requested_bytes, block.free) for block in allocator.segments()[0].blocks] == [(0, True)]


@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
def test_each_stream_has_blocks_of_its_own(settings: AllocatorSettings) -> None:
    """What one stream has released serves that stream alone, in segments and in expandable ranges."""
    allocator = CachingAllocator(128 * MIB, settings)
    allocator.free(allocator.allocate(40 * MIB, 1))
    allocator.allocate(40 * MIB, 2)
    assert allocator.reserved == 80 * MIB
    allocator.allocate(40 * MIB, 1)
    assert (allocator.reserved, allocator.num_alloc_retries) == (80 * MIB, 0)
    assert {(segment.stream, segment.size_bytes) for segment in allocator.segments()} == {(1, 40 * MIB), (2, 40 * MIB)}
    small = allocator.allocate(1, 3)
    assert allocator.allocated == 80 * MIB + 512
    allocator.free(small)
    allocator.empty_cache()
    assert allocator.reserved == 80 * MIB


def test_other_streams_caches_are_released_for_a_request() -> None:
    """A card that is full of another stream's free blocks has room after one try."""
    allocator = CachingAllocator(64 * MIB)
    allocator.free(allocator.allocate(40 * MIB, 1))
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.num_alloc_retries) == (40 * MIB, 1)


def test_what_another_stream_uses_is_not_free_yet() -> None:
    """Once released a block is not allocated, but it serves no request before the other stream is done with it."""
    allocator = CachingAllocator()
    block = allocator.allocate(40 * MIB, 1)
    allocator.request_free(block)
    assert (allocator.allocated, [each.state for each in allocator.segments()[0].blocks]) == (
        0,
        ["active_pending_free"],
    )
    assert allocator.requested == 40 * MIB  # as in PyTorch, which takes it off with the bytes that are active
    allocator.free(allocator.allocate(40 * MIB, 1))
    assert allocator.reserved == 80 * MIB
    other = allocator.allocate(40 * MIB, 1)
    allocator.complete_free(block)
    assert (allocator.requested, allocator.max_allocated) == (40 * MIB, 40 * MIB)
    allocator.free(other)
    again = [allocator.allocate(40 * MIB, 1) for _ in range(2)]
    assert (allocator.allocated, allocator.reserved, None in again) == (80 * MIB, 80 * MIB, False)
    allocator.complete_free(block)  # it is in use again
    assert allocator.allocated == 80 * MIB


@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
def test_other_streams_are_waited_for_before_memory_runs_out(settings: AllocatorSettings) -> None:
    """On a full card the allocator lets all streams finish and releases what they have used."""
    allocator = CachingAllocator(64 * MIB, settings)
    block = allocator.allocate(40 * MIB, 1)
    allocator.request_free(block)
    allocator.request_free(None)
    allocator.allocate(40 * MIB)
    assert (allocator.allocated, allocator.reserved, allocator.num_alloc_retries) == (40 * MIB, 40 * MIB, 1)
    allocator.complete_free(block)
    allocator.complete_free(None)
    assert allocator.allocated == 40 * MIB


@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
def test_closing_lets_go_of_all_blocks(settings: AllocatorSettings) -> None:
    """No block is left for a garbage collection to find, of those in use, free, split or merged on any stream."""
    gc.collect()
    gc.disable()
    try:
        allocator = CachingAllocator(256 * MIB, settings)
        blocks = [allocator.allocate(size, stream) for stream in (0, 1) for size in (512, 600 * KIB, 3 * MIB, 30 * MIB)]
        for block in blocks[::3]:
            allocator.free(block)
        allocator.close()
        del allocator, blocks, block
        assert not any(type(each) is Block for each in gc.get_objects())
    finally:
        gc.enable()
