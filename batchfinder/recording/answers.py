"""The largest batch size or sequence length on simulated cards: by replaying traces, or by trying sizes on the stub."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

from batchfinder.errors import BatchFinderError
from batchfinder.find import find_max_batch_size
from batchfinder.recording.client import TriedSize
from batchfinder.results import Measurement, SearchResult, Shape
from batchfinder.search import (
    DEFAULT_MAX_BATCH_SIZE,
    Bisection,
    Prediction,
    Search,
    Secant,
    within_limits,
)
from batchfinder.search.secant import FIRST_TRY_SHARE_OF_PREDICTION
from batchfinder.simulator.steady_state import SimulatedProbe, fill_card, predict_max_batch_size

_CONFIRMATIONS = 8
"""Searches for an answer, each with more sizes recorded than the one before: of a compiled step, or of one that differs
from what it was scaled to."""
_SMALLEST_SHARE = 128
"""Of a size: what it is narrowed down to where what comes after the first steps decides."""
_LARGER_SHARE = 32
"""Of a size that fits: what is added to see whether a larger one does."""
_MOST_SLOPE = 2.0
"""What a sample adds to reserved bytes, at most, per byte that it adds to those allocated; at least the inverse."""
_OTHER_FIRST_TRIES = 0.9, 0.8, 0.95, 0.99
"""Shares of a prediction to begin a search with, where the usual one is of a size that does not fit."""


class TriedSizes:
    """Says whether a size runs on a card, by PyTorch's own word: a process on the CUDA stub takes the steps.

    Args:
        submit: has a size tried.
        unmodelled: what any answer leaves out, in words.
        twice: whether the answer has to run a second time, as a compiled step does whose graphs are in Inductor's cache
            then: what compiling took of the card is gone, and the allocator has other segments.
    """

    source = "simulated"

    def __init__(
        self,
        submit: Callable[[int, int | None], Future[TriedSize]],
        unmodelled: Iterable[str] = (),
        twice: bool = False,
    ) -> None:
        self._submit = submit
        self.twice = twice
        self._asked: dict[tuple[int, int | None], Future[TriedSize]] = {}
        self._unmodelled = dict.fromkeys(unmodelled)

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What the answers so far leave out, in words."""
        return tuple(self._unmodelled)

    def ask(self, batch_size: int, shape: Shape) -> None:
        """Have a size tried, without waiting for it."""
        key = batch_size, shape.seq_len
        if key not in self._asked:
            self._asked[key] = self._submit(*key)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        self.ask(batch_size, shape)
        measurement, unmodelled = self._asked[batch_size, shape.seq_len].result()
        self._unmodelled |= dict.fromkeys(unmodelled)
        return measurement

    def try_again(self, batch_size: int, shape: Shape) -> Measurement:
        """Take the steps of a size that runs once more; if it fails then, it has failed."""
        again = self._submit(batch_size, shape.seq_len)
        if not again.result().measurement.fits:
            self._asked[batch_size, shape.seq_len] = again
        return self(batch_size, shape)


def search_simulated(
    probe: SimulatedProbe,
    shape: Shape,
    max_batch_size: int | None = None,
    min_batch_size: int = 1,
    multiple_of: int = 1,
    confirm: bool = True,
) -> SearchResult:
    """Find the largest batch size that fits, with tolerance 0.

    Args:
        max_batch_size: the largest of interest; None for no such bound.
        min_batch_size: the smallest of interest.
        multiple_of: only multiples of it are of interest.
        confirm: whether the sizes that decide it are recorded themselves, where they were scaled.

    Raises:
        InvalidValue: there is no such size.
    """
    for _ in range(_CONFIRMATIONS):
        search: Search[Any]
        if probe.traces.is_scaled(shape.seq_len):
            full, filled = fill_card(probe, shape, max_batch_size or DEFAULT_MAX_BATCH_SIZE)
            search = Secant(tolerance=0.0, predicted=full, margin=0.0)
            if probe.steady_state(full + 1, shape).fits:  # by giving memory back
                search = Bisection(full + 1, max(full + 1, filled) + 1)
        else:
            # A line tends to be a little too high: it does not know what the allocator cannot use.
            start = predict_max_batch_size(probe, shape)
            if multiple_of == 1:
                start = _recorded_prediction(probe, shape, min(start, max_batch_size or start))
            search = Secant(tolerance=0.0, predicted=start, margin=0.0)
        search = within_limits(search, max_batch_size, min_batch_size, multiple_of)
        result = find_max_batch_size(probe, shape, search=search)
        # That it fits, and that the next size does not.
        decisive = {max(result.max_batch_size, min_batch_size), result.max_batch_size + multiple_of}
        decisive = {size for size in decisive if max_batch_size is None or size <= max_batch_size}
        if not confirm or not probe.traces.confirm(sorted(decisive), shape.seq_len):
            break
    return result


def search_tried(
    sizes: TriedSizes | LengthProbe,
    shape: Shape,
    max_batch_size: int | None = None,
    min_batch_size: int = 1,
    multiple_of: int = 1,
    predicted: int | None = None,
    line: tuple[int, float] | None = None,
) -> SearchResult:
    """Find the largest batch size that runs on a card of the CUDA stub, where the next one does not, by trying them.

    Args:
        max_batch_size: and the next two: as for `search_simulated`.
        predicted: what the answer is likely to be; None where nothing is known.
        line: what the card has and what a sample takes, in bytes, to search by where the prediction may be far off.

    Raises:
        InvalidValue: there is no such size.
        BatchFinderError: the step could not be taken there.
    """
    smallest, step = -(-min_batch_size // multiple_of) * multiple_of, multiple_of
    # A prediction that is too large is so by little: it is not halved.
    while line is None and predicted is not None and predicted > smallest and not sizes(predicted, shape).fits:
        predicted, step = max(smallest, predicted - step), 2 * step
    limit_bytes, bytes_per_sample = line or (None, 0.0)
    while True:
        search: Search[Any] = Secant(limit_bytes, 0.0, predicted, bytes_per_sample, margin=0.0)
        search = within_limits(search, max_batch_size, min_batch_size, multiple_of)
        result = find_max_batch_size(sizes, shape, search=search)
        size = result.max_batch_size
        if not (size and isinstance(sizes, TriedSizes) and sizes.twice) or sizes.try_again(size, shape).fits:
            return result
        predicted, limit_bytes = max(0, size - multiple_of), None


def predict_full_card(
    probe: SimulatedProbe,
    shape: Shape,
    max_batch_size: int | None = None,
    later: Callable[[int], Sequence[int | None]] = lambda batch_size: (),
) -> Prediction:
    """The largest size with which a card is full and gives no cached memory back, as the start of a search by trials.

    Args:
        max_batch_size: the largest of interest; None for no such bound.
        later: what training does after the recorded steps, as `SimulatedProbe.reserved_over` takes it, for a batch
            size.
    """
    if not probe.traces.is_scaled(shape.seq_len):
        return Prediction(search_simulated(probe, shape, max_batch_size, confirm=False).max_batch_size)
    room, most = probe.memory.capacity_bytes, max_batch_size or DEFAULT_MAX_BATCH_SIZE
    full, _ = fill_card(probe, shape, most)
    first = int(FIRST_TRY_SHARE_OF_PREDICTION * full)
    if first < 2:
        return Prediction(full)
    low, high = (probe.unlimited(size, shape).max_allocated_bytes for size in (first, full))
    each = max(1.0, (high - low) / (full - first))

    def over(size: int) -> int:
        return probe.reserved_over(size, shape, later(size)) - room

    too_large = None
    while full > 2 and (excess := over(full)) > 0:
        too_large, full = full, max(2, full - max(1, full // _SMALLEST_SHARE, int(excess / each)))
    while too_large is None and full < most:  # the curve may end at a size whose segments tell too little of the next
        larger = min(most, full + max(1, full // _LARGER_SHARE))
        too_large, full = (larger, full) if over(larger) > 0 else (None, larger)
    while too_large is not None and too_large - full > max(1, full // _SMALLEST_SHARE):
        middle = (too_large + full) // 2
        too_large, full = (middle, full) if over(middle) > 0 else (too_large, middle)
    first = int(FIRST_TRY_SHARE_OF_PREDICTION * full)
    if first < 2:  # a batch of one is a recording of its own
        return Prediction(full)
    # Large blocks may leave the cache in such pieces that a size needs more than a larger one.
    shares = (first, *(int(share * full) for share in _OTHER_FIRST_TRIES))
    first = next((size for size in shares if size > 1 and over(size) <= 0), first)
    slope = -over(first) / (full - first)
    return Prediction(full, min(_MOST_SLOPE * each, max(each / _MOST_SLOPE, slope)), first)


def check_scaling(probe: SimulatedProbe, shape: Shape, max_batch_size: int | None, multiple_of: int) -> None:
    """Record an eager step at about the size that fills a card, so that no answer of a smaller card needs it.

    Raises:
        RecordingFailed: it failed; `UserCodeFailed` if it was the user's code that did.
    """
    if probe.traces.is_scaled(shape.seq_len):
        most = max_batch_size or DEFAULT_MAX_BATCH_SIZE
        probe.traces.confirm([min(fill_card(probe, shape, most)[1] + multiple_of, most)], shape.seq_len)


def search_cards(
    pickled: bytes, shape: Shape, max_batch_size: int | None, min_batch_size: int, multiple_of: int
) -> list[SearchResult | None]:
    """`search_simulated` for several cards, in a process that cannot record; None where that is needed, or it fails.

    `pickled` is a list of `SimulatedProbe`: a pool would pickle them itself in a thread, while their traces change.
    """
    found: list[SearchResult | None] = []
    for probe in pickle.loads(pickled):
        try:
            limits = max_batch_size, min_batch_size, multiple_of
            found.append(search_simulated(probe, shape, *limits))
        except BatchFinderError:
            found.append(None)
    return found


def _recorded_prediction(probe: SimulatedProbe, shape: Shape, predicted: int) -> int:
    """The prediction, or a size not far below it that runs, where each size is recorded itself."""
    for size in (predicted, max(1, predicted - 1)):
        probe.traces.ask(size, shape.seq_len)
    step = 1
    while predicted > 1 and not probe.steady_state(predicted, shape).fits:
        predicted, step = max(1, predicted - step), 2 * step
    return predicted


@dataclass(frozen=True)
class LengthProbe:
    """Says whether a sequence length runs at one batch size, for a search whose sizes are lengths."""

    probe: SimulatedProbe | TriedSizes
    batch_size: int
    source: ClassVar[str] = "simulated"

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What the answers so far leave out, in words."""
        return self.probe.unmodelled

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        return self.probe(self.batch_size, Shape(batch_size))  # the search's size is a length here


def search_seq_len(probe: SimulatedProbe, batch_size: int, step: int, longest: int) -> SearchResult:
    """Find the longest sequence that fits at a batch size; what decides it is recorded at its very length.

    Args:
        probe: for the step and the GPU.
        step: lengths of interest are multiples of this.
        longest: the longest of interest, at least `step`.

    Returns:
        A result whose sizes are lengths.
    """
    traces = probe.traces.for_lengths(step, longest)
    scaled = SimulatedProbe(traces, probe.memory, probe.allocator, probe.unmodelled)
    lengths = LengthProbe(scaled, batch_size)
    predicted: int | None = None
    while True:
        search: Search[Any] = Secant(tolerance=0.0, predicted=predicted, margin=0.0)
        search = within_limits(search, longest, step, step)
        result = find_max_batch_size(lengths, Shape(), search=search)
        answer = result.max_batch_size
        if traces.exact:
            return result
        wanted = {length: length == answer for length in (answer, answer + step) if 0 < length <= longest}
        steady = {length: scaled.steady_state(batch_size, Shape(length), exact=True) for length in wanted}
        if all(steady[length].fits == fits for length, fits in wanted.items()):
            return result
        traces.exact, predicted = True, answer or None
