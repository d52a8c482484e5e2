"""The simulated probe and the first guess."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchfinder.find import find_max_batch_size
from batchfinder.recording.answers import TriedSizes, predict_full_card, search_simulated, search_tried
from batchfinder.recording.client import TriedSize
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.search import Secant
from batchfinder.search.secant import FIRST_TRY_SHARE_OF_PREDICTION
from batchfinder.simulator.alloc_conf import BEFORE_2_12, AllocatorSettings
from batchfinder.simulator.allocator import UNLIMITED, CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe, fill_card, predict_max_batch_size
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.units import GIB, MIB
from tests.builders.retaking import retaking

SHAPE = Shape(128)
CARD = DeviceMemory(12 * GIB, 11 * GIB)


def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
    """A gibibyte of weights and 24 MiB per sample of 128 tokens."""
    structure = TraceStructure(
        (0, 1, ~1),
        (StageMark(0, -1, "model"), StageMark(1, 0, "forward")),
        ("a", "b"),
        ("", ""),
        ("parameter", "activation"),
    )
    sizes = (GIB, batch_size * (seq_len or 1) * 24 * MIB // 128)
    future: Future[Trace] = Future()
    future.set_result(Trace(batch_size, seq_len, structure, sizes, ("something",)))
    return future


def probe(card: DeviceMemory = CARD, settings: AllocatorSettings | None = None) -> SimulatedProbe:
    """A probe of that step."""
    return SimulatedProbe(TraceSource(submit, [128]), card, settings)


def test_fits_with_both_peaks() -> None:
    """A size that runs is measured by the allocator's two maxima."""
    measurement = probe()(100, SHAPE)
    assert measurement.verdict is Verdict.FITS
    assert measurement.peak_allocated_bytes == measurement.peak_reserved_bytes == GIB + 100 * 24 * MIB


def test_replays_leave_no_blocks() -> None:
    """No block of a replay is left for a garbage collection to find, of one that ran and of one that did not."""
    gc.collect()
    gc.disable()
    try:
        for settings in (None, AllocatorSettings(expandable_segments=True)):
            asked = probe(settings=settings)
            assert [asked(size, SHAPE).verdict for size in (100, 10_000)] == [Verdict.FITS, Verdict.OUT_OF_MEMORY]
        assert not any(type(each) is Block for each in gc.get_objects())
    finally:
        gc.enable()


def test_out_of_memory_in_pytorchs_words() -> None:
    """A size that does not run says so as PyTorch would, and that it is simulated."""
    measurement = probe()(10_000, SHAPE)
    assert measurement.verdict is Verdict.OUT_OF_MEMORY
    assert "simulated" in measurement.message
    assert "Tried to allocate 234.38 GiB" in measurement.message


def test_what_it_leaves_out_is_passed_on() -> None:
    """The recording's `unmodelled` is the probe's, once anything was asked."""
    asked = probe()
    assert asked.unmodelled == ()
    asked(2, SHAPE)
    asked(3, SHAPE)
    assert asked.unmodelled == ("something",)
    assert asked.source == "simulated"


def test_what_never_settles_is_thrashing() -> None:
    """A card with room for the small blocks or the large one, but not for both, gives back memory in each step."""
    asked = SimulatedProbe(TraceSource(retaking, [None]), DeviceMemory(20 * MIB, 20 * MIB))
    assert asked(12, Shape()).fits
    seen = asked(14, Shape())
    assert (seen.verdict, seen.fits, seen.peak_allocated_bytes) == (Verdict.THRASHING, False, 14 * MIB)
    assert seen.message == "the allocator releases all cached memory in each of 8 more steps (thrashing)"
    assert asked(22, Shape()).verdict is Verdict.OUT_OF_MEMORY


def test_settings_reach_the_allocator() -> None:
    """Expandable segments grow in 20 MiB pages."""
    plain, expandable = (
        probe(settings=settings).timeline(3, SHAPE).max_reserved_bytes
        for settings in (None, AllocatorSettings(expandable_segments=True))
    )
    assert plain == GIB + 72 * MIB
    assert expandable % (20 * MIB) == 0


def test_exact_steady_state_is_recorded_itself() -> None:
    """It equals the scaled one, at the price of a recording."""
    asked = probe()
    scaled = asked.steady_state(50, SHAPE)
    before = asked.traces.recordings
    assert asked.steady_state(50, SHAPE, exact=True) == scaled
    assert asked.traces.recordings == before + 1


def test_needed_bytes_are_what_would_be_reserved() -> None:
    """The bytes that a card would have to have, whether the probe's has them or not."""
    small = probe(DeviceMemory(GIB, GIB // 2))
    assert small.needed_bytes(10, SHAPE) == GIB + 240 * MIB
    assert small(1, SHAPE).needed_bytes == GIB + 24 * MIB
    assert small(2, SHAPE).needed_bytes is None


def probe_of(card: DeviceMemory, per_sample: int = 24 * MIB) -> SimulatedProbe:
    """A gibibyte of weights and something per sample."""

    def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
        structure = TraceStructure(
            (0, 1), (StageMark(0, -1, "model"),), ("a", "b"), ("", ""), ("parameter", "activation")
        )
        future: Future[Trace] = Future()
        future.set_result(Trace(batch_size, seq_len, structure, (GIB, batch_size * per_sample)))
        return future

    return SimulatedProbe(TraceSource(submit, [128]), card)


@pytest.mark.parametrize("usable", [2 * GIB, 5 * GIB, 11 * GIB])
def test_prediction_is_close(usable: int) -> None:
    """A line through two sizes finds the answer of a linear step, give or take the rounding of one sample."""
    asked = probe_of(DeviceMemory(12 * GIB, usable))
    answer = find_max_batch_size(asked, SHAPE, search=Secant(tolerance=0.0)).max_batch_size
    assert answer == (usable - GIB) // (24 * MIB)
    assert abs(predict_max_batch_size(asked, SHAPE) - answer) <= 1


def test_prediction_is_at_least_two() -> None:
    """Even a card that is too small gets a guess that can be probed without a recording of its own."""
    assert predict_max_batch_size(probe_of(DeviceMemory(GIB, GIB // 2)), SHAPE) == 2


def test_no_slope_no_line() -> None:
    """A step that takes the same memory at any size has no line to follow; the larger of the two sizes is the guess."""
    assert predict_max_batch_size(probe_of(DeviceMemory(12 * GIB, 11 * GIB), per_sample=0), SHAPE) == 32


def test_a_peak_of_the_optimizer_hides_no_stage_that_grows() -> None:
    """At small sizes the optimizer's 3 GiB are the peak, which has no slope; a sample takes 24 MiB in the forward."""

    def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
        marks = StageMark(0, -1, "model"), StageMark(1, 0, "forward"), StageMark(3, 0, "optimizer")
        structure = TraceStructure((0, 1, ~1, 2, ~2), marks, *(("", "", ""),) * 3)
        future: Future[Trace] = Future()
        future.set_result(Trace(batch_size, seq_len, structure, (GIB, batch_size * 24 * MIB, 3 * GIB)))
        return future

    asked = SimulatedProbe(TraceSource(submit, [128]), DeviceMemory(12 * GIB, 9 * GIB))
    assert asked.trace(7, SHAPE).most_held() == [0, GIB, GIB + 7 * 24 * MIB, 4 * GIB]
    answer = find_max_batch_size(asked, SHAPE, search=Secant(tolerance=0.0)).max_batch_size
    assert answer == 8 * GIB // (24 * MIB)
    assert abs(predict_max_batch_size(asked, SHAPE) - answer) <= 1


class Unscaled:
    """Recordings whose events differ with the size: 24 MiB a sample, and `more` for it in one piece."""

    def __init__(self, more: int = 0) -> None:
        self.more = more
        self.asked: list[int] = []

    def __call__(self, batch_size: int, seq_len: int | None) -> Future[Trace]:
        self.asked.append(batch_size)
        names = ("",) * (batch_size + 2)
        structure = TraceStructure(tuple(range(batch_size + 2)), (), names, names, names)
        sizes = (GIB, *(batch_size * [24 * MIB]), self.more * batch_size)
        future: Future[Trace] = Future()
        future.set_result(Trace(batch_size, seq_len, structure, sizes))
        return future


def test_the_prediction_of_an_unscaled_step_takes_no_recording() -> None:
    """Where each size is recorded itself, the line goes through the two that have shown it."""
    recordings = Unscaled()
    asked = SimulatedProbe(TraceSource(recordings, [128]), DeviceMemory(3 * GIB, 2 * GIB))
    assert predict_max_batch_size(asked, SHAPE) == GIB // (24 * MIB)
    assert sorted(recordings.asked) == [7, 13]


def test_a_recorder_that_does_not_scale_records_each_size() -> None:
    """As the CUDA build: no size is answered by the recordings of two others, though they scale."""
    scales, does_not = (TraceSource(submit, [128], scales=scales) for scales in (True, False))
    assert (scales.is_scaled(128), does_not.is_scaled(128)) == (True, False)


@pytest.mark.parametrize(("predicted", "tried"), [(42, {42, 43}), (40, {40, 41, 42, 43}), (44, {41, 42, 43, 44})])
def test_a_prediction_is_where_tries_begin(predicted: int, tried: set[int]) -> None:
    """Where it is right, that size and the next one are tried and no other; else its neighbours are as well."""
    asked: list[int] = []

    def attempt(batch_size: int, seq_len: int | None) -> Future[TriedSize]:
        asked.append(batch_size)
        fits, peak = batch_size <= 42, GIB + 24 * MIB * batch_size
        future: Future[TriedSize] = Future()
        future.set_result(TriedSize(Measurement(Verdict.FITS if fits else Verdict.OUT_OF_MEMORY, peak, peak), ("it",)))
        return future

    sizes = TriedSizes(attempt)
    result = search_tried(sizes, SHAPE, predicted=predicted)
    assert (result.max_batch_size, result.unmodelled) == (42, ("it",))
    assert sorted(asked) == sorted(set(asked))
    assert set(asked) == tried


@pytest.mark.parametrize(("predicted", "line"), [(42, None), (25, (GIB + 24 * MIB * 42, 30.0 * MIB))])
def test_an_answer_that_fails_the_second_time_is_none(predicted: int, line: tuple[int, float] | None) -> None:
    """As a compiled step may from Inductor's cache: the next smaller size is the answer, if it runs twice.

    Where the prediction is far off, a line through the peaks leads to it in a few tries.
    """
    asked: list[int] = []

    def attempt(batch_size: int, seq_len: int | None) -> Future[TriedSize]:
        asked.append(batch_size)
        fits = batch_size < 42 or (batch_size == 42 and asked.count(42) == 1)
        peak = GIB + 24 * MIB * batch_size
        future: Future[TriedSize] = Future()
        future.set_result(TriedSize(Measurement(Verdict.FITS if fits else Verdict.OUT_OF_MEMORY, peak, peak), ()))
        return future

    assert search_tried(TriedSizes(attempt), SHAPE, predicted=predicted, line=line).max_batch_size == 42
    asked.clear()
    assert search_tried(TriedSizes(attempt, twice=True), SHAPE, predicted=predicted, line=line).max_batch_size == 41
    assert {size: asked.count(size) for size in (41, 42, 43)} == {41: 2, 42: 2, 43: 1}
    assert len(asked) <= 9


@pytest.mark.parametrize("usable", [GIB + 10 * MIB, 2 * GIB, 5 * GIB])
def test_an_unscaled_search_records_little(usable: int) -> None:
    """Two sizes, the predicted one and the one under it, and the one above where both run; the answer is exact."""
    recordings = Unscaled(more=MIB // 2)
    asked = SimulatedProbe(TraceSource(recordings, [128]), DeviceMemory(usable + GIB, usable))
    answer = search_simulated(asked, SHAPE).max_batch_size
    assert asked(answer, SHAPE).fits if answer else not asked(1, SHAPE).fits
    assert not asked(answer + 1, SHAPE).fits
    assert len(recordings.asked) == len(set(recordings.asked)) <= 6


@pytest.mark.parametrize("expandable", [False, True])
def test_cards_share_what_is_replayed(expandable: bool) -> None:
    """A card that asks after others are told what a card that asks alone is, at every size near its memory's end."""
    settings = AllocatorSettings(expandable_segments=expandable)
    traces = TraceSource(submit, [128])
    cards = [DeviceMemory(3 * GIB, usable) for usable in (GIB + 100 * MIB, GIB + 250 * MIB, 2 * GIB + 20 * MIB)]
    for card in cards:
        shared, answer = SimulatedProbe(traces, card, settings), search_simulated(probe(card, settings), SHAPE)
        together = search_simulated(shared, SHAPE)
        assert together.max_batch_size == answer.max_batch_size
        seen, alone = ([replace(trial.measurement, seconds=0) for trial in each.trials] for each in (together, answer))
        assert seen == alone
        for size in range(2, answer.max_batch_size + 4):
            assert shared.steady_state(size, SHAPE) == probe(card, settings).steady_state(size, SHAPE)


def neighbours(order: tuple[int, ...], parts: tuple[int, ...]) -> TraceSource:
    """Blocks of so many MiB a sample; which of two free ones of one size is taken decides what merges."""

    def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
        names = ("",) * len(parts)
        structure = TraceStructure(order, (), names, names, ("temporary",) * len(parts))
        future: Future[Trace] = Future()
        future.set_result(Trace(batch_size, seq_len, structure, tuple(batch_size * part * MIB for part in parts)))
        return future

    return TraceSource(submit, [None])


@pytest.mark.parametrize(
    ("trace", "before_2_12", "since"),
    [
        (((0, 1, ~1, 2, 3, ~0, ~3, 4, ~2, 5), (40, 80, 40, 40, 40, 80)), 63, 84),
        (((0, ~0, 1, 2, 3, ~2, ~3, 4, ~1, 5), (80, 40, 40, 40, 40, 80)), 84, 63),
    ],
)
def test_which_of_equal_free_blocks_is_taken_decides(
    trace: tuple[tuple[int, ...], tuple[int, ...]], before_2_12: int, since: int
) -> None:
    """Where neighbours merge, 120 MiB a sample are reserved; else 160, or 200 but for a segment that is given back."""
    card = DeviceMemory(10_080 * MIB, 10_080 * MIB)
    for settings, size in ((BEFORE_2_12, before_2_12), (AllocatorSettings(), since)):
        asked = SimulatedProbe(neighbours(*trace), card, settings)
        assert search_simulated(asked, Shape()).max_batch_size == size
        assert [asked(each, Shape()).fits for each in (size, size + 1)] == [True, False]


@pytest.mark.parametrize("usable", [GIB, GIB + 70 * MIB, 2 * GIB, 5 * GIB, 11 * GIB])
def test_a_full_card_is_read_off_the_curve(usable: int) -> None:
    """The largest size of which no more is reserved than there is, at least 2 and at most what is of interest."""
    asked = probe_of(DeviceMemory(12 * GIB, usable))
    right = max(2, (usable - GIB) // (24 * MIB))
    assert fill_card(asked, SHAPE, 1 << 20) == (right, right)
    assert fill_card(asked, SHAPE, 40) == (min(right, 40), min(right, 40))


def small_blocks(large: int) -> TraceSource:
    """Of 4 KiB a sample, which have segments of 2 MiB up to 256 samples and of 20 MiB above; and a large one."""

    def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
        names = ("",) * 31
        structure = TraceStructure(tuple(range(31)), (), names, names, ("activation",) * 31)
        future: Future[Trace] = Future()
        future.set_result(Trace(batch_size, seq_len, structure, (*[batch_size * 4096] * 30, batch_size * large)))
        return future

    return TraceSource(submit, [None])


@pytest.mark.parametrize(("large", "usable"), [(MIB, 360 * MIB), (MIB // 4, 132 * MIB)])
def test_a_size_whose_segments_say_too_much_of_larger_ones_does_not_end_the_curve(large: int, usable: int) -> None:
    """15 segments of 2 MiB at 256 samples stand for as many of 20 MiB at 257, where there are two."""
    asked = SimulatedProbe(small_blocks(large), DeviceMemory(usable, usable))
    most = max(size for size in range(2, 512) if asked.unlimited(size, Shape()).max_reserved_bytes <= usable)
    assert 300 < most < 350
    assert most - 4 <= fill_card(asked, Shape(), 1 << 20)[0] <= most
    assert most - 2 <= predict_full_card(asked, Shape()).batch_size <= most


def two_steps(batch_size: int, seq_len: int | None) -> Future[Trace]:
    """Of two micro-batches each, in which a layer's input outlives its activations; the last output is kept."""
    of_a_step = ("input", "activation", "input", "activation", "output")
    order = (0, 1, ~1, ~0, 2, 3, ~3, 4, ~2, ~4, 5, 6, ~6, ~5, 7, 8, ~8, 9, ~7, ~9)
    marks = (
        StageMark(0, 0, "forward"),
        StageMark(4, 0, "forward", 1),
        StageMark(9, 1, "zero_grad"),
        StageMark(10, 1, "forward"),
        StageMark(14, 1, "forward", 1),
        StageMark(19, 1, "end"),
    )
    names = 2 * of_a_step
    sizes = tuple(each * MIB * batch_size for each in 2 * (1, 8, 1, 8, 5))
    future: Future[Trace] = Future()
    structure = TraceStructure(order, marks, names, ("",) * len(names), names)
    future.set_result(Trace(batch_size, seq_len, structure, sizes))
    return future


def reserved_by_hand(batch_size: int, later: list[int | None]) -> int:
    """What the same steps reserve at most, with each allocation asked for here."""
    allocator = CachingAllocator(UNLIMITED)
    output = None
    for last in (batch_size, batch_size, *later):
        if last is None:
            allocator.empty_cache()
            continue
        if output is not None:
            allocator.free(output)
        for samples, is_last in ((batch_size, False), (last, True)):
            held, activation = (allocator.allocate(each * MIB * samples) for each in (1, 8))
            allocator.free(activation)
            if is_last:
                output = allocator.allocate(5 * MIB * samples)
            allocator.free(held)
    return allocator.max_reserved


@example(batch_size=17, later=[17, 9, None, 17, 17])
@given(
    batch_size=st.integers(2, 60), later=st.lists(st.none() | st.integers(2, 60), min_size=1, max_size=8).filter(any)
)
def test_later_steps_are_those_of_a_training(batch_size: int, later: list[int | None]) -> None:
    """Smaller last micro-batches and an emptied cache, as the allocator takes them one by one."""
    probe = SimulatedProbe(TraceSource(two_steps, [None]), CARD)
    assert probe.reserved_over(batch_size, Shape(), later) == reserved_by_hand(batch_size, later)


def test_of_one_step_there_are_no_later_ones() -> None:
    """As of an evaluation: what it reserves is what counts."""
    assert probe().reserved_over(10, SHAPE, [5, None, 10]) == probe().needed_bytes(10, SHAPE)


def test_a_prediction_has_room_for_later_steps() -> None:
    """It is the largest size but for 1 %, and the line from the first try ends at it."""
    probe = SimulatedProbe(TraceSource(two_steps, [None]), DeviceMemory(40 * GIB, 40 * GIB))

    def later(batch_size: int) -> list[int | None]:
        return [batch_size // 2, None, batch_size, batch_size]

    plain, fewer = predict_full_card(probe, Shape()), predict_full_card(probe, Shape(), later=later)
    room = probe.memory.capacity_bytes
    size = fewer.batch_size
    assert size < plain.batch_size
    assert reserved_by_hand(size, later(size)) <= room < reserved_by_hand(size + size // 64, later(size + size // 64))
    assert probe.needed_bytes(plain.batch_size, Shape()) <= room
    first = int(FIRST_TRY_SHARE_OF_PREDICTION * size)
    line = first + (room - reserved_by_hand(first, later(first))) / fewer.bytes_per_sample
    assert line == pytest.approx(size, abs=1)


def test_a_search_begins_where_the_cache_is_not_in_pieces() -> None:
    """At 0.85 of the prediction as a rule; at another share where that size would need more than a larger one."""

    class Pieces(SimulatedProbe):
        def reserved_over(self, batch_size: int, shape: Shape, later: Sequence[int | None]) -> int:
            return super().reserved_over(batch_size, shape, later) + 50 * GIB * (batch_size in hole)

    hole = range(0)
    probe = Pieces(TraceSource(two_steps, [None]), DeviceMemory(40 * GIB, 40 * GIB))
    usual = predict_full_card(probe, Shape())
    assert usual.first_try == int(FIRST_TRY_SHARE_OF_PREDICTION * usual.batch_size)
    hole = range(int(0.84 * usual.batch_size), int(0.92 * usual.batch_size))
    assert predict_full_card(probe, Shape())[::2] == (usual.batch_size, int(0.8 * usual.batch_size))


def test_a_small_prediction_asks_for_no_batch_of_one() -> None:
    """Which no recording of larger ones stands for, and which the callback has none for."""

    def larger(batch_size: int, seq_len: int | None) -> Future[Trace]:
        assert batch_size > 1
        future: Future[Trace] = Future()
        future.set_result(replace(two_steps(100 * batch_size, seq_len).result(), batch_size=batch_size))
        return future

    probe = SimulatedProbe(TraceSource(larger, [None]), DeviceMemory(4 * GIB, 4 * GIB))
    assert predict_full_card(probe, Shape()).batch_size == 4
    assert predict_full_card(probe, Shape(), later=lambda size: [size // 2, None, size, size]).batch_size == 2
