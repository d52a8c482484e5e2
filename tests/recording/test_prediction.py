"""Tests of batchfinder/recording/prediction.py, on steps whose blocks are known for each size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from batchfinder.recording.prediction import _prime, predict_batch_size, scaled
from batchfinder.results import Measurement, Verdict
from batchfinder.search import Bounds, Prediction
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.replay import replay
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.units import MIB

LIMIT = 1024 * MIB
SCRATCH = 16 * MIB
HELD = 24 * MIB  # beside the peaks that are measured


def step_of(batch_size: int, scratch_from: int | None = None, gathered: int = 0) -> Trace:
    """Three steps beside what was there before: activations, gradients, and states that the first step makes.

    From a size on its loss takes two more blocks, as kernels do that share their work out. Gathered weights take as
    much in each forward, whatever the size.
    """
    sizes, order, marks = [HELD, 100 * MIB], [0, 1], []

    def allocate(size: int) -> int:
        order.append(len(sizes))
        sizes.append(size)
        return len(sizes) - 1

    batch, gradients = -1, -1
    for step in range(3):
        marks.append(StageMark(len(order), step, "batch"))
        fresh = allocate(4000 * batch_size)
        if batch >= 0:
            order.append(~batch)
        batch = fresh
        whole = allocate(gathered) if gathered else None
        kept = [allocate(300_000 * batch_size + 1000) for _ in range(3)]
        if scratch_from is not None and batch_size >= scratch_from:
            scratch, semaphores = allocate(256 * batch_size), allocate(16)
            order.extend([~semaphores, ~scratch])
        if gradients < 0:
            gradients = allocate(50 * MIB)
        order.extend(~block for block in reversed(kept))
        if whole is not None:
            order.append(~whole)
        marks.append(StageMark(len(order), step, "optimizer"))
        if step == 0:
            allocate(100 * MIB)
    marks.append(StageMark(len(order), 2, "end"))
    nothing = ("",) * len(sizes)
    return Trace(batch_size, None, TraceStructure(tuple(order), tuple(marks), nothing, nothing, nothing), tuple(sizes))


class Card:
    """Records steps on a GPU with so much memory, of which some is held by a copy of the training state.

    Attributes:
        asked: the sizes that were recorded.
    """

    def __init__(self, make: Callable[[int], Trace] = step_of, limit: int = LIMIT, gathered: int = 0) -> None:
        self._make = make
        self._limit = limit
        self._gathered = gathered
        self.asked: list[int] = []

    def reserved(self, batch_size: int) -> int | None:
        """What is reserved at most; None where it does not fit."""
        trace = self._make(batch_size)
        memory = DeviceMemory(self._limit + HELD, self._limit + HELD)
        timeline = replay(trace.structure, trace.sizes, CachingAllocator(memory))
        return timeline.max_reserved_bytes - HELD if timeline.fits and not timeline.num_alloc_retries else None

    def __call__(self, batch_size: int) -> tuple[Measurement, Trace | None]:
        self.asked.append(batch_size)
        reserved = self.reserved(batch_size)
        if reserved is None:
            return Measurement(Verdict.OUT_OF_MEMORY), None
        resting, forward = 250 * MIB, 904_000 * batch_size + self._gathered
        measured = Measurement(Verdict.FITS, reserved, reserved, resting_bytes=resting, forward_bytes=forward)
        return measured, self._make(batch_size)

    def predict(self, bounds: Bounds | None = None) -> Prediction | None:
        """Without what comes later."""
        return predict_batch_size(self, bounds or Bounds(), self._limit, HELD, SCRATCH)

    def is_largest(self, batch_size: int) -> bool:
        """Whether it fits and the next size does not."""
        return self.reserved(batch_size) is not None and self.reserved(batch_size + 1) is None


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The log is kept from level INFO on."""
    with caplog.at_level(logging.INFO, "batchfinder"):
        yield


@pytest.mark.parametrize("limit", [LIMIT, 5 * LIMIT])
def test_two_small_sizes_tell_the_largest(limit: int, caplog: pytest.LogCaptureFixture) -> None:
    """Exactly, as it takes no kernels of its own; with what a sample adds, for the search to go on by."""
    card = Card(limit=limit)
    predicted = card.predict()
    assert predicted is not None
    assert predicted.batch_size > 500
    assert card.is_largest(predicted.batch_size)
    assert 904_000 < predicted.bytes_per_sample < 1.5 * 904_000  # in whole segments
    assert card.asked[0] == 2
    assert len(card.asked) == 2
    assert 2 < card.asked[1] < predicted.batch_size / 3
    said = f"BatchFinder: batch size predicted from recorded steps: {predicted.batch_size}"
    assert caplog.messages == [said]


def test_what_training_will_not_have_counts_for_the_recordings_alone() -> None:
    """The copy of the training state lies beside what is recorded, and so does it in the prediction."""
    card = Card()
    more, same = Card(limit=LIMIT + 200 * MIB), predict_batch_size(card, Bounds(), LIMIT, HELD + 200 * MIB, SCRATCH)
    assert same is not None
    assert more.is_largest(same.batch_size)


def test_what_comes_later_makes_it_smaller() -> None:
    """A smaller batch at an epoch's end, and an emptied cache: pieces into which the next full step does not fit."""
    card = Card()
    plain = card.predict()
    later = predict_batch_size(
        card, Bounds(), LIMIT, HELD, SCRATCH, lambda size: [size // 3, size, None, size // 5, size]
    )
    assert plain is not None
    assert later is not None
    assert later.batch_size < plain.batch_size


def test_a_step_that_takes_other_kernels_from_some_size_on() -> None:
    """What the smaller size does not take is in proportion to the size, and the rest is as it was."""
    card = Card(lambda size: step_of(size, scratch_from=20))
    predicted = card.predict()
    assert predicted is not None
    assert card.asked[0] < 20 < card.asked[1]
    assert card.is_largest(predicted.batch_size)


def test_the_scratch_memory_of_sums_grows_to_what_all_threads_take() -> None:
    """Here 256 KiB for each sample, to 16 MiB, at a time when two megabytes for each are held."""

    def summing(batch_size: int) -> Trace:
        trace = step_of(batch_size, scratch_from=0)
        scratch = {256 * batch_size: min(SCRATCH, 256 * 1024 * batch_size), 16: 128}
        return replace(trace, sizes=tuple(scratch.get(size, size) for size in trace.sizes))

    card = Card(summing)
    predicted = card.predict()
    assert predicted is not None
    assert card.is_largest(predicted.batch_size)
    assert card.asked[1] * 256 * 1024 > SCRATCH
    slower = predict_batch_size(card, Bounds(), LIMIT, HELD, 1 << 40)
    assert slower is not None
    assert slower.batch_size < predicted.batch_size


def test_how_each_block_scales() -> None:
    """Those of the same bytes, in proportion, with the square, on a line, or of the larger size alone."""
    nothing = ("",) * 6

    def trace(batch_size: int, *sizes: int) -> Trace:
        marks = (StageMark(0, 0, "batch"),)
        count = len(sizes)
        structure = TraceStructure(tuple(range(count)), marks, nothing[:count], nothing[:count], nothing[:count])
        return Trace(batch_size, None, structure, sizes)

    small, large = trace(2, 700, 20, 4, 1011, 700, 20), trace(7, 700, 70, 49, 1061, 700, 70)
    assert scaled(small, large, SCRATCH).at(100, None).sizes == (700, 1000, 10_000, 1991, 700, 1000)
    assert scaled(small, large, SCRATCH).at(7, None).sizes == large.sizes
    # Bytes that are the same and in proportion to others: what there are as many of.
    assert scaled(trace(2, 70, 70, 20), trace(7, 70, 70, 70), SCRATCH).at(14, None).sizes == (140, 140, 140)
    assert scaled(trace(2, 70, 70, 4), trace(7, 70, 70, 49), SCRATCH).at(14, None).sizes == (70, 70, 196)
    # A block more: in proportion.
    assert scaled(trace(2, 20, 33), trace(7, 70, 500, 14), SCRATCH).at(14, None).sizes == (140, 1000, 28)


@pytest.mark.parametrize("number", range(1, 60))
def test_primes(number: int) -> None:
    """The next one, of multiples the next that is a prime times the number."""
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]
    expected = 1 if number == 1 else next(prime for prime in primes if prime >= number)
    assert _prime(number, 1) == expected
    assert _prime(8 * number - 3, 8) == 8 * expected


def test_what_the_step_raises_is_left_to_the_search(caplog: pytest.LogCaptureFixture) -> None:
    """It may be about this size alone."""

    def record(batch_size: int) -> tuple[Measurement, Trace | None]:
        raise ValueError(f"{batch_size} is not to my liking")

    assert predict_batch_size(record, Bounds(), LIMIT, HELD, SCRATCH) is None
    assert caplog.messages == ["BatchFinder: no prediction: ValueError: 2 is not to my liking"]


def test_where_there_is_little_to_search_nothing_is_recorded_for_it() -> None:
    """Neither up to a small cap, nor for a second time where the first size is about the last or does not fit."""
    card = Card()
    assert card.predict(Bounds(max_batch_size=8)) is None
    assert card.asked == []
    assert Card(limit=300 * MIB).predict(Bounds(min_batch_size=200)) is None


def test_a_size_that_does_not_fit_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """No other is recorded: each that fails costs a search as much as a try that fails."""
    card = Card(lambda size: step_of(size if size < 20 else 5000))
    assert card.predict() is None
    assert len(card.asked) == 2
    assert Card(limit=100 * MIB).predict() is None
    assert caplog.messages == [
        f"BatchFinder: no prediction: batch size {card.asked[1]} does not fit",
        "BatchFinder: no prediction: batch size 2 does not fit",
    ]


@pytest.mark.parametrize("fits_up_to", [None, 20])
def test_what_a_forward_takes_once_is_told_from_what_a_sample_takes(fits_up_to: int | None) -> None:
    """A second size, next to the first, says so; one that does not fit later on leaves the two to predict by."""

    def make(batch_size: int) -> Trace:
        return step_of(batch_size if fits_up_to is None or batch_size <= fits_up_to else 5000, gathered=300 * MIB)

    card = Card(make, limit=1200 * MIB, gathered=300 * MIB)
    predicted = card.predict()
    assert card.asked[:2] == [2, 3]
    assert len(card.asked) == 3
    assert predicted is not None
    assert Card(lambda size: step_of(size, gathered=300 * MIB), limit=1200 * MIB).is_largest(predicted.batch_size)


def test_far_beyond_the_cap_one_recording_will_do() -> None:
    """So that the first try is the cap itself; near it the answer is predicted."""
    card = Card(limit=5 * LIMIT)
    predicted = card.predict(Bounds(max_batch_size=16))
    assert predicted is not None
    assert predicted.batch_size > 32
    assert card.asked == [2]
    exact = card.predict()
    assert exact is not None
    assert card.predict(Bounds(max_batch_size=exact.batch_size)) == exact


def test_only_sizes_that_may_be_tried_are_recorded() -> None:
    """Multiples, from the smallest on."""
    card = Card()
    assert card.predict(Bounds(min_batch_size=20, multiple_of=16)) is not None
    assert card.asked[0] == 32
    assert all(size % 16 == 0 for size in card.asked)
