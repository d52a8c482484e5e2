"""Tests of the replay: stages, peaks, failures and what is alive at a moment."""

from __future__ import annotations

import time
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.simulator.replay import PeakEvent, StageMemory, alive_at, replay
from batchfinder.simulator.trace import StageMark, TraceStructure
from batchfinder.units import MIB


def structure(order: list[int], marks: tuple[StageMark, ...] = ()) -> TraceStructure:
    """A trace without names."""
    blank = ("",) * sum(i >= 0 for i in order)
    return TraceStructure(tuple(order), marks, blank, blank, blank)


# Blocks: 0 the parameters, 1 and 2 activations, 3 empty, 4 the gradient, 5 the optimizer's state.
ORDER = [0, 1, 2, 3, ~2, 4, ~1, 5, ~4]
SIZES = [12 * MIB, 14 * MIB, 30 * MIB, 0, 12 * MIB, 24 * MIB]
MARKS = (
    StageMark(0, -1, "model"),
    StageMark(1, 0, "forward"),
    StageMark(4, 0, "loss"),
    StageMark(4, 0, "backward", 1),
    StageMark(7, 0, "optimizer"),
    StageMark(9, 0, "end"),
)
TRACE = structure(ORDER, MARKS)


def test_stages_show_the_counters_at_their_end() -> None:
    """Each stage has what is held when its last event is over, and the maxima since the trace began."""
    timeline = replay(TRACE, SIZES, CachingAllocator())
    assert timeline.stages == tuple(
        StageMemory(step, stage, micro_batch, *(number * MIB for number in numbers))
        for step, stage, micro_batch, numbers in [
            (-1, "model", 0, (12, 12, 12, 12)),
            (0, "forward", 0, (56, 56, 56, 56)),
            (0, "loss", 0, (56, 56, 56, 56)),  # two marks at one position: the first stage is empty
            # the gradient is split off the 30 MiB, of which 18 MiB stay free
            (0, "backward", 1, (24, 56, 56, 56)),
            # the optimizer's 24 MiB fit in neither 14 nor 18 MiB
            (0, "optimizer", 0, (36, 56, 80, 80)),
            (0, "end", 0, (36, 56, 80, 80)),
        ]
    )
    assert timeline.fits
    assert timeline.num_alloc_retries == 0


def test_a_block_that_another_stream_has_used() -> None:
    """From the event on before which the host has waited it serves requests; on a full card it does before."""
    order = [0, ~0, 1, 2, ~1, 3]
    sizes = [30 * MIB] * 4
    marks = (StageMark(0, 0, "forward"), StageMark(3, 0, "backward"), StageMark(4, 0, "optimizer"))
    reserved = {}
    for waited in (None, 2, 3, 5, 6):
        waits = () if waited is None else ((waited, 0),)
        events = replace(structure(order, marks), free_completed=waits)
        reserved[waited] = [
            stage.max_reserved_bytes // MIB for stage in replay(events, sizes, CachingAllocator()).stages
        ]
        assert replay(events, sizes, CachingAllocator(64 * MIB)).stages[-1].max_reserved_bytes == 60 * MIB
    assert reserved == {None: [30, 60, 60], 2: [30, 60, 60], 3: [60, 60, 60], 5: [60, 90, 90], 6: [60, 90, 90]}
    both = replace(structure(order, marks), free_completed=((3, 0), (6, 1)))
    stages = replay(both, sizes, CachingAllocator()).stages
    assert [(stage.allocated_bytes // MIB, stage.reserved_bytes // MIB) for stage in stages] == [
        (30, 60),
        (60, 60),
        (60, 90),
    ]


def test_a_block_is_free_before_another_is_released() -> None:
    """The host has waited for one before the event that releases the next, which waits as well."""
    events = replace(structure([0, 1, ~0, ~1, 2]), free_completed=((3, 0), (5, 1)))
    allocator = CachingAllocator()
    replay(events, [30 * MIB] * 3, allocator)
    assert (allocator.allocated, allocator.reserved) == (30 * MIB, 60 * MIB)


def test_peaks_name_the_allocation_that_reached_them() -> None:
    """The most allocated and the most reserved are reached at different moments."""
    timeline = replay(TRACE, SIZES, CachingAllocator())
    assert (timeline.max_allocated_bytes, timeline.max_reserved_bytes) == (56 * MIB, 80 * MIB)
    assert timeline.allocated_peak == PeakEvent(2, 2, 0, "forward", 0)
    assert timeline.reserved_peak == PeakEvent(7, 5, 0, "optimizer", 0)


def test_a_smaller_card_makes_do_by_releasing_its_cache() -> None:
    """70 MiB suffice: the free 14 MiB segment goes back before the optimizer's state is allocated."""
    timeline = replay(TRACE, SIZES, CachingAllocator(70 * MIB))
    assert timeline.fits
    assert timeline.num_alloc_retries == 1
    assert timeline.stages[-1].reserved_bytes == (12 + 30 + 24) * MIB
    assert timeline.max_reserved_bytes == 66 * MIB


def test_a_failure_is_a_value() -> None:
    """On 60 MiB the optimizer's state fails; the stages before it are there and the failure has its figures."""
    timeline = replay(TRACE, SIZES, CachingAllocator(DeviceMemory(64 * MIB, 60 * MIB)))
    assert not timeline.fits
    assert [stage.stage for stage in timeline.stages] == ["model", "forward", "loss", "backward"]
    oom = timeline.oom
    assert oom is not None
    assert oom.moment == PeakEvent(7, 5, 0, "optimizer", 0)
    assert (oom.requested_bytes, oom.tried_bytes) == (24 * MIB, 24 * MIB)
    assert (oom.allocated_bytes, oom.reserved_bytes) == (24 * MIB, 42 * MIB)
    assert oom.message.startswith(
        "CUDA out of memory. Tried to allocate 24.00 MiB. GPU 0 (simulated) has a total capacity of 64.00 MiB of which "
        "18.00 MiB is free. Including non-PyTorch memory, this process has 46.00 MiB memory in use. Of the allocated "
        "memory 24.00 MiB is allocated by PyTorch, and 18.00 MiB is reserved by PyTorch but unallocated."
    )
    assert timeline.allocated_peak == PeakEvent(2, 2, 0, "forward", 0)


def test_moments_fall_in_the_stage_that_began_last() -> None:
    """A failure in the first stage or in the last one names that stage."""
    marks = (StageMark(0, -1, "model"), StageMark(1, 0, "forward", 2))
    for capacity, moment in ((11, PeakEvent(0, 0, -1, "model", 0)), (13, PeakEvent(1, 1, 0, "forward", 2))):
        timeline = replay(structure([0, 1], marks), [12 * MIB, 14 * MIB], CachingAllocator(capacity * MIB))
        assert timeline.oom is not None
        assert timeline.oom.moment == moment


def test_a_trace_without_marks_or_events_is_replayed() -> None:
    """There need be no stages, and an empty trace has no peaks."""
    timeline = replay(structure(ORDER), SIZES, CachingAllocator())
    assert timeline.stages == ()
    assert timeline.allocated_peak == PeakEvent(2, 2, -1, "", 0)
    empty = replay(structure([]), [], CachingAllocator())
    assert (empty.fits, empty.max_reserved_bytes, empty.allocated_peak, empty.reserved_peak) == (True, 0, None, None)


def test_events_before_the_first_mark_count() -> None:
    """What comes before the first mark is replayed too, and belongs to no stage."""
    timeline = replay(structure([0, 1], (StageMark(1, 0, "forward"),)), [12 * MIB, 14 * MIB], CachingAllocator())
    assert [stage.allocated_bytes for stage in timeline.stages] == [26 * MIB]


def test_what_is_alive_is_found_for_any_position() -> None:
    """Blocks are alive from the event that allocates them until before the one that releases them."""
    assert [alive_at(TRACE, position) for position in range(len(ORDER))] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 3],
        [0, 1, 3, 4],
        [0, 3, 4],
        [0, 3, 4, 5],
        [0, 3, 5],
    ]


@st.composite
def traces(draw: st.DrawFn) -> tuple[TraceStructure, list[int]]:
    """A random trace in which every release follows its allocation."""
    order: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    length = draw(st.integers(0, 60))
    for release in draw(st.lists(st.integers(-20, 20), min_size=length, max_size=length)):
        if release >= 0 and live:
            order.append(~live.pop(release % len(live)))
        else:
            live.append(len(sizes))
            order.append(len(sizes))
            sizes.append(draw(st.one_of(st.integers(0, 3 * MIB), st.integers(0, 40 * MIB))))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
    return structure(order, tuple(StageMark(cut, 0, f"stage {i}") for i, cut in enumerate(cuts))), sizes


@settings(max_examples=150, deadline=None, derandomize=True)
@given(traces(), st.one_of(st.none(), st.integers(0, 200 * MIB)), st.booleans())
def test_agrees_with_stepping_through_the_allocator(
    trace: tuple[TraceStructure, list[int]], capacity: int | None, expandable: bool
) -> None:
    """Counters by stage, first peaks and failure are those of an allocator that is watched event by event."""
    events, sizes = trace
    conf = AllocatorSettings(expandable_segments=expandable)
    timeline = replay(events, sizes, CachingAllocator(capacity, conf))
    watched = CachingAllocator(capacity, conf)
    live: dict[int, Block | None] = {}
    history = [(0, 0, 0, 0)]
    alive: list[list[int]] = []
    failed = None
    for position, i in enumerate(events.order):
        try:
            if i >= 0:
                live[i] = watched.allocate(sizes[i])
            else:
                watched.free(live.pop(~i))
        except SimulatedOutOfMemory:
            failed = position
            break
        alive.append(list(live))
        history.append((watched.allocated, watched.max_allocated, watched.reserved, watched.max_reserved))
    ends = [*(mark.position for mark in events.marks[1:]), len(events.order)] if events.marks else []
    assert [
        (s.allocated_bytes, s.max_allocated_bytes, s.reserved_bytes, s.max_reserved_bytes) for s in timeline.stages
    ] == [history[end] for end in ends if failed is None or end <= failed]
    assert (timeline.oom.moment.position if timeline.oom else None) == failed
    for peak, column in ((timeline.allocated_peak, 1), (timeline.reserved_peak, 3)):
        if peak is None:
            assert history[-1][column] == 0
        else:
            assert history[peak.position][column] < history[peak.position + 1][column] == history[-1][column]
            assert events.order[peak.position] == peak.block
            assert alive_at(events, peak.position) == alive[peak.position]


def test_twelve_thousand_events_take_milliseconds() -> None:
    """A trace as long as two steps of BERT-large is replayed fast enough to be searched over (8 ms measured).

    24 layers, each of which allocates what it keeps and what it drops, then a backward that frees it, 12 times over.
    """
    order: list[int] = []
    sizes: list[int] = []
    for _ in range(12):
        kept = []
        for layer in range(25):
            for tensor in range(10):
                order.append(len(sizes))
                sizes.append((layer % 5 + 1) * (tensor + 1) * 300_000)
                order.append(len(sizes))
                sizes.append((tensor + 1) * 70_000)
                kept.append(len(sizes) - 2)
                order.append(~(len(sizes) - 1))
        order += [~block for block in reversed(kept)]
    assert 11_000 < len(order) < 13_000
    seconds = []
    for _ in range(5):
        start = time.process_time()
        assert replay(structure(order), sizes, CachingAllocator()).fits
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1  # far above; CPU time, so that a busy machine does not fail it
