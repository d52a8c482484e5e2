"""The model-guided search, most of the way on a line through measured peaks, and the model fitted to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from batchfinder.errors import InvalidValue
from batchfinder.results import Shape, StopReason, Trial, Verdict
from batchfinder.search.base import Bounds, Bracket, Search, check_tolerance
from batchfinder.units import MIB

SEGMENT_BYTES = 20 * MIB
"""Steps in which the CUDA caching allocator takes memory for requests of 1 to 10 MiB.

Source: `kLargeBuffer` of PyTorch's CUDACachingAllocator.
"""

_MAX_GROWTH_ON_FLAT_PEAKS = 16
"""How far to go on peaks that hardly grow: at small sizes the optimizer's peak, which is flat, hides the samples'."""

_CLEAR_RISE_SEGMENTS = 4
"""Segments by which two peaks must differ for the line through them to count."""

_NOISE_SHARE_OF_FIRST_PEAK = 0.02
"""Share of the first peak by which a later one must exceed it to lie beyond the flat part."""

_MAX_RISE_PER_FORWARD_BYTE = 1.6
"""Bytes a sample adds to the peak, at most, per byte it adds to the forward's.

Measured on recorded steps (BERT, GPT-2, T5, ViT, ResNet-50, Llama; fp32 and bf16-mixed): 0.99 to 1.16, and with
gradient checkpointing 1.16 to 1.50.
"""

_MIN_RISE_PER_FORWARD_BYTE = 0.9
"""The same ratio, at least: a line that rises less is not yet beyond the flat part."""

_FAR_GUESS_RATIO = 2
_SHARE_OF_FAR_GUESS = 0.9
"""Beyond `_FAR_GUESS_RATIO` times the last size only this share of a guess is aimed at: what noise adds to one peak
grows with the distance, and a size near the answer shows the rest."""

_SHARE_OF_FORWARD_CROSSING = 0.6
"""How far to go on the forward's bytes alone, as a share of the size at which they would meet the limit."""

_MAX_GROWTH_BY_FORWARD = 64
"""How far to go on them in one step: at small sizes they are mostly what a forward takes once."""


class Prediction(NamedTuple):
    """A guess of the answer, from a simulated step.

    Attributes:
        batch_size: the largest size that is thought to run; 0 when nothing is.
        bytes_per_sample: what a sample adds to the peak from the first try on to that, where the limit is met; 0 where
            it is not known. It is right where the step takes some more than was simulated, at all sizes alike.
        first_try: a size below that to begin with, at which the cache is not in pieces; 0 for the usual share.
    """

    batch_size: int
    bytes_per_sample: float = 0.0
    first_try: int = 0


@dataclass(frozen=True, slots=True)
class PeakModel:
    """Peaks of the sizes that ran, smallest first, and where they lead.

    A training step's peak is the larger of two: the optimizer's, which is flat, and that of forward and backward, which
    is affine in the batch size. What the device reports moves in segments, so a line is drawn as steep as one segment
    of rounding allows: a guess that is too low costs a probe that runs, one too high costs an out-of-memory.

    Attributes:
        points: (batch size, peak bytes) of each size that ran.
        resting_bytes: the least that was seen to stay between steps; None where no probe said.
        forwards: (batch size, bytes of the first forward) of each size whose probe said.
    """

    points: tuple[tuple[int, int], ...] = ()
    resting_bytes: int | None = None
    forwards: tuple[tuple[int, int], ...] = ()

    def add(self, trial: Trial) -> PeakModel:
        """Take in a trial; one that failed, or whose peak is unknown, adds nothing."""
        seen = trial.measurement
        peak = seen.peak_allocated_bytes if seen.peak_reserved_bytes is None else seen.peak_reserved_bytes
        if not trial.fits or peak is None:
            return self
        points = (*self.points, (trial.batch_size, peak))
        if seen.resting_bytes is None or seen.forward_bytes is None:
            return PeakModel(points)  # this peak came from something else than a step, as those of larger sizes will
        # The least: a batch that outlives its step makes what stays grow with the size.
        resting = seen.resting_bytes if self.resting_bytes is None else min(self.resting_bytes, seen.resting_bytes)
        return PeakModel(points, resting, (*self.forwards, (trial.batch_size, seen.forward_bytes)))

    def crossing(self, limit_bytes: int | None) -> int | None:
        """The largest size expected to have its peak within the limit.

        Returns:
            The size; None when the limit is not known, there is nothing to fit or the peaks fall.
        """
        if limit_bytes is None or not self.points or self.points[-1][1] <= 0:
            return None
        (_, first_peak), (size, peak) = self.points[0], self.points[-1]
        left = limit_bytes - peak
        rounding = min(SEGMENT_BYTES, limit_bytes // 512)  # less than a segment where the limit is too small for any
        clear_rise = _CLEAR_RISE_SEGMENTS * rounding
        # The nearest point at most three quarters as large as the last, so that rounding does not tilt the line.
        smaller = (point for point in reversed(self.points[:-1]) if 4 * point[0] <= 3 * size)
        distant = next(smaller, self.points[0])
        if self.resting_bytes is None:
            # Peaks are all there is. One is joined to the origin, as if only samples took memory: too low a guess.
            if len(self.points) == 1:
                return size * limit_bytes // peak
            # Where the last two rise clearly the line through them is tried too, and the lower crossing holds: on a
            # curve that is flat at first and then rises, a line that begins on the flat part says too much.
            lines = [distant]
            if peak - self.points[-2][1] > clear_rise:
                lines.append(self.points[-2])
            rise = peak - distant[1] + rounding
            if rise <= 0:
                return None
            found = size + min(left * (size - x) // (peak - y + rounding) for x, y in lines)
            # Peaks that differ by less than a segment say little.
            return min(found, _MAX_GROWTH_ON_FLAT_PEAKS * size) if rise <= 2 * rounding else found
        # The lowest crossing of the lines whose both ends lie beyond the flat part, clearly above the first peak.
        each = self._forward_each()
        beyond_flat = max(clear_rise, _NOISE_SHARE_OF_FIRST_PEAK * first_peak)
        least = max(0.0, _MIN_RISE_PER_FORWARD_BYTE * each)
        crossings = [
            size + left * (size - x) // (peak - y + rounding)
            for x, y in {distant, *self.points[-2:-1]}
            if y - first_peak > beyond_flat and peak - y > max(clear_rise, least * (size - x))
        ]
        if crossings:
            return min(crossings)
        guess = self.lower_bound(limit_bytes) or 0
        if guess > _FAR_GUESS_RATIO * size:
            guess = int(_SHARE_OF_FAR_GUESS * guess)
        if peak - first_peak > beyond_flat:
            return guess
        # As far as the forward's bytes allow to go, while the optimizer's peak hides those of the samples.
        if each <= 0:
            return max(guess, 0)
        tried, taken = self.forwards[-1]
        meeting = _SHARE_OF_FORWARD_CROSSING * (tried + (limit_bytes - self.resting_bytes - taken) / each)
        return max(guess, min(_MAX_GROWTH_BY_FORWARD * tried, int(meeting)))

    def lower_bound(self, limit_bytes: int) -> int | None:
        """A size that runs on any curve that grows no less steeply with size, by what stays and what forwards take.

        Two lines lead to it, and both err on the low side. One joins the last peak to what stays between steps, as if
        size 0 took no more (measured: 1.00 to 1.17 times that). The other goes on from the last peak with
        `_MAX_RISE_PER_FORWARD_BYTE` times what a sample adds to the forward.

        Returns:
            The size; None where probes did not say what stays.
        """
        if not self.points or self.resting_bytes is None:
            return None
        size, peak = self.points[-1]
        floor = min(self.resting_bytes, peak - 1)
        chord = size * (limit_bytes - floor) // (peak - floor)
        each = self._forward_each()
        if each <= 0:
            return chord
        onward = size + int((limit_bytes - peak) / (_MAX_RISE_PER_FORWARD_BYTE * each))
        return max(chord, min(_MAX_GROWTH_BY_FORWARD * size, onward))

    def _forward_each(self) -> float:
        """Bytes a sample adds to the forward; all of the forward's where only one size was tried."""
        size, taken = self.forwards[-1]
        if len(self.forwards) == 1:
            return taken / size
        first, least = self.forwards[0]
        return (taken - least) / (size - first)


_MAX_SURPRISES = 2
"""Guesses that may be a little too low before the steps grow; while they do not, one failure ends the search."""

FIRST_TRY_SHARE_OF_PREDICTION = 0.85
"""Where to start, as a share of the prediction, when the peak there will be of use.

At small sizes the peak is the optimizer's, which is flat, and a line from there says that too much fits. A quarter of
the prediction may lie on that flat part, this share hardly ever does. Measured on 1,000 made-up curves that are flat at
first, predicted within 2 %: at most 5 probes and 1 failure; from a quarter, 8 probes and 3 failures.
"""

_SHARE_OF_ALLOCATED_CROSSING = 0.97
"""How far to go, as a share of the size at which what is allocated would fill the limit, once reserved peaks misled.

Near a CUDA card's limit the allocator gives back what it has reserved and does not use, so that more fits than reserved
peaks let expect; what is allocated bounds it. Measured on recorded steps of ResNet-50 and DistilBERT: 0.968 to 0.991.
"""

_DOUBTED_BEYOND = 0.05
"""How far beyond the prediction, as a share of it, a line through peaks is followed before a size between has run."""

_WIDE_BRACKET_RATIO = 4
"""Above this ratio of its ends a bracket is halved in its logarithm, which leaves a guess far too high sooner."""


@dataclass(frozen=True, slots=True)
class SecantState:
    """What is known, and how well the guesses did.

    Attributes:
        peaks: of the sizes that ran: reserved, or allocated where that is all a probe measures.
        allocated_peaks: allocated, where reserved peaks are known as well; else empty.
        limit_bytes: what a peak may have; None when unknown.
        surprises: sizes that ran although they were guessed to fail; after the first, although what is allocated should
            not have fitted either.
    """

    bracket: Bracket
    peaks: PeakModel
    limit_bytes: int | None
    tries: int = 0
    surprises: int = 0
    allocated_peaks: PeakModel = field(default_factory=PeakModel)


@dataclass(frozen=True)
class Secant(Search[SecantState]):
    """For a real device, where a probe costs seconds and a failure more: guess from peaks, certify by probing.

    With a prediction it probes 0.85 of it (which warms the device up and gives the line a second point), then just
    under it; a line that leads far beyond it is followed once a size just above it has run. Without one it starts at
    the first size. From there it moves by a line through the peaks measured so far: to just under where the line meets
    the limit, then to the size at which a failure ends the search. Measurements without peaks leave the prediction,
    then doubling and bisection.

    A good prediction takes 3 or 4 probes, the last of which is the one failure. Without one it depends on what probes
    say. Where they read what stays between steps and what the first forward takes (`Measurement.resting_bytes`,
    `forward_bytes`), any answer up to 4096 took 5 probes as a rule on 600 made-up curves that are flat at first: 98 %
    took at most 6 and 1 failure, none more than 7 and 2. Where all they say is the peak, 26 % did.

    After `patience` probes guesses no longer count, so that a curve that is not affine costs at most
    `patience + 2 * n + 2` probes, where `n` is the number of binary digits of the cap.

    Attributes:
        limit_bytes: bytes a peak may have, as the probe counts them; None when unknown (`Headroom` says it too).
        tolerance: may end once a failing size is within this share of the answer; 0 for the exact maximum.
        predicted: a guess of the answer, such as the simulated step's; None without one.
        bytes_per_sample: as a `Prediction` says it; the second try is where a line of that slope from the first one's
            peak meets the limit.
        first_try: as a `Prediction` says it.
        margin: how far under the prediction to start, as a share of it: the prediction's own usual error.
        patience: probes for which guesses count.

    Raises:
        InvalidValue: a setting is out of range.
    """

    limit_bytes: int | None = None
    tolerance: float = 0.01
    predicted: int | None = None
    bytes_per_sample: float = 0.0
    first_try: int = 0
    margin: float = 0.02
    patience: int = 16

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)
        if self.limit_bytes is not None and self.limit_bytes <= 0:
            raise InvalidValue("limit_bytes", self.limit_bytes, "a positive number of bytes")
        if self.predicted is not None and self.predicted < 0:
            raise InvalidValue("predicted", self.predicted, "a size, or 0 when nothing is predicted to fit")
        if not 0 <= self.margin < 1:
            raise InvalidValue("margin", self.margin, "a share from 0 to below 1, such as 0.02")
        if self.patience < 0:
            raise InvalidValue("patience", self.patience, "a number of probes")

    def init(self, shape: Shape, bounds: Bounds) -> SecantState:
        """Nothing is known yet; the tighter of the two byte limits holds."""
        limits = [limit for limit in (self.limit_bytes, bounds.limit_bytes) if limit is not None]
        return SecantState(Bracket(bounds), PeakModel(), min(limits, default=None))

    def propose(self, state: SecantState) -> int | None:
        """The size most likely to end the search, at the least risk of a failure."""
        bracket, predicted = state.bracket, self.predicted
        if bracket.stop(self.tolerance):
            return None
        under_prediction = 0 if predicted is None else predicted - int(self.margin * predicted)
        if state.tries == 0:
            # A share of the prediction where its peak will be of use, else just under the prediction.
            first_try = self.first_try or int(FIRST_TRY_SHARE_OF_PREDICTION * (predicted or 0))
            useful = predicted is not None and state.limit_bytes is not None
            return bracket.inside(first_try if useful else under_prediction)
        low, high, guess, gap = bracket.low, bracket.high, self._guess(state), self._tolerated_gap(bracket)
        if high is not None:
            # Something failed: probe near the guess if it lies between, else in the middle. On a curve that grows
            # steeper the guess is no more than an upper bound, and may lie above what failed.
            impatient = state.tries > self.patience
            if predicted and low < predicted < high and not (guess is not None and low <= guess < high):
                guess = predicted  # the line was wrong, and what failed does not say that of the prediction
            size, enough = (low + high) // 2, high - int(self.tolerance * high)
            if guess is None or not low <= guess < high or impatient:
                if state.limit_bytes is not None and state.peaks.points:
                    sure = 0 if impatient else state.peaks.lower_bound(state.limit_bytes) or 0
                    if low + gap < sure < high:
                        size = sure
                    elif high > _WIDE_BRACKET_RATIO * low > 0:
                        # A line led so far too high that the answer's order of magnitude is in question.
                        size = math.isqrt(low * high)
            elif guess >= enough:
                size = enough
            else:
                size = max(low + gap, guess - int(self.tolerance * guess) // 2)
                if len(state.peaks.points) == 1 and 4 * high <= 5 * low:
                    # The prediction was a little too high. One point says little, and a second next to it no more.
                    size = max(size, low + (high - low) // 3)
            return bracket.inside(size)
        if guess is None:
            return bracket.step()
        # Nothing failed yet: jump to just under the guess, or once there to where a failure would end the search. The
        # third surprise, and each probe past the patience, doubles the least step: this ends for any curve.
        late = max(0, state.surprises - _MAX_SURPRISES) + max(0, state.tries - self.patience)
        least = low + (gap << late)
        sizes = [least]
        if guess > least:
            sizes.append(guess - int(self.tolerance * guess) // 2)
        if late == 0 and state.surprises:
            filled = state.allocated_peaks.crossing(state.limit_bytes) or 0
            sizes.append(int(_SHARE_OF_ALLOCATED_CROSSING * filled))
        if state.tries == 1 and not self.bytes_per_sample:
            sizes.append(under_prediction)
        size = max(sizes)
        above = 0 if predicted is None else predicted + max(bracket.bounds.multiple_of, int(self.tolerance * predicted))
        if predicted and low < above and size > (1 + _DOUBTED_BEYOND) * predicted:
            # Rounded peaks, a little apart, lead far beyond the prediction sooner than it is that far too low.
            size = max(least, above)
        return bracket.inside(size)

    def update(self, state: SecantState, trial: Trial) -> SecantState:
        """Narrow the bracket, add the peak to the model, and count a guess that was too low."""
        guess, seen = self._guess(state), trial.measurement
        filled = (state.allocated_peaks.crossing(state.limit_bytes) if state.surprises else None) or 0
        surprised = trial.fits and guess is not None and trial.batch_size > max(guess, filled)
        allocated = state.allocated_peaks
        if seen.peak_allocated_bytes is not None and seen.peak_reserved_bytes is not None:
            allocated = allocated.add(replace(trial, measurement=replace(seen, peak_reserved_bytes=None)))
        return SecantState(
            state.bracket.update(trial),
            state.peaks.add(trial),
            state.limit_bytes,
            state.tries + 1,
            state.surprises + surprised,
            allocated,
        )

    def result(self, state: SecantState) -> tuple[int, StopReason]:
        return state.bracket.result(self.tolerance)

    def should_retry(self, state: SecantState, trial: Trial) -> bool:
        """A failure within the tolerance of the guess, or above, is what was expected, and is believed at once."""
        guess = self._guess(state)
        doubted = guess is None or trial.batch_size + self._tolerated_gap(state.bracket) <= guess
        doubted |= trial.measurement.verdict is Verdict.FELL_BACK
        return doubted and super().should_retry(state, trial)

    def _guess(self, state: SecantState) -> int | None:
        """The largest size thought to run: by the model, else by the prediction."""
        points = state.peaks.points
        if self.bytes_per_sample and len(points) == 1 and state.limit_bytes is not None:
            ((size, peak),) = points
            return size + int((state.limit_bytes - peak) / self.bytes_per_sample)
        fitted = state.peaks.crossing(state.limit_bytes)
        return self.predicted if fitted is None else fitted

    def _tolerated_gap(self, bracket: Bracket) -> int:
        """How far above the low end a failure would end the search."""
        return max(bracket.bounds.multiple_of, int(self.tolerance * bracket.low))
