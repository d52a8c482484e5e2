"""Peak memory as a function of the batch size, fitted to the sizes that ran."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.results import Trial
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
            return PeakModel(points, self.resting_bytes, self.forwards)
        # The least: a batch that outlives its step makes what stays grow with the size.
        resting = seen.resting_bytes if self.resting_bytes is None else min(self.resting_bytes, seen.resting_bytes)
        return PeakModel(points, resting, (*self.forwards, (trial.batch_size, seen.forward_bytes)))

    def crossing(self, limit_bytes: int) -> int | None:
        """The largest size expected to have its peak within the limit.

        Returns:
            The size; None when there is nothing to fit or the peaks fall.
        """
        if not self.points or self.points[-1][1] <= 0:
            return None
        if self.resting_bytes is None:
            return self._by_peaks(limit_bytes)
        by_line = self._by_trusted_line(limit_bytes)
        if by_line is not None:
            return by_line
        lower_bound = self.lower_bound(limit_bytes)
        if lower_bound is None:
            return None
        size, peak = self.points[-1]
        guess = int(_SHARE_OF_FAR_GUESS * lower_bound) if lower_bound > _FAR_GUESS_RATIO * size else lower_bound
        return guess if self._beyond_flat(peak, limit_bytes) else max(guess, self._by_forward(limit_bytes))

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

    def _by_peaks(self, limit_bytes: int) -> int | None:
        """The crossing where peaks are all there is.

        One point is joined to the origin, as if nothing but samples took memory: a guess that errs on the low side. Two
        whose peaks differ by less than a segment say little, so the line is followed to
        `_MAX_GROWTH_ON_FLAT_PEAKS` times the size.

        Where the last two peaks rise clearly, the line through them is tried too, and the lower crossing holds: on a
        curve that is flat at first and then rises, a line that begins on the flat part says too much.
        """
        size, peak = self.points[-1]
        if len(self.points) == 1:
            return size * limit_bytes // peak
        rounding = _rounding(limit_bytes)
        lines = [self._distant_point()]
        if peak - self.points[-2][1] > _CLEAR_RISE_SEGMENTS * rounding:
            lines.append(self.points[-2])
        rise = peak - lines[0][1] + rounding
        if rise <= 0:
            return None
        crossing = min((limit_bytes - peak) * (size - x) // (peak - y + rounding) for x, y in lines) + size
        return min(crossing, _MAX_GROWTH_ON_FLAT_PEAKS * size) if rise <= 2 * rounding else crossing

    def _by_trusted_line(self, limit_bytes: int) -> int | None:
        """The lowest crossing of the lines whose both ends lie beyond the flat part; None without such a line."""
        size, peak = self.points[-1]
        rounding = _rounding(limit_bytes)
        least = max(0.0, _MIN_RISE_PER_FORWARD_BYTE * self._forward_each())
        crossings = [
            size + (limit_bytes - peak) * (size - x) // (peak - y + rounding)
            for x, y in {self._distant_point(), *self.points[-2:-1]}
            if self._beyond_flat(y, limit_bytes) and peak - y > max(_CLEAR_RISE_SEGMENTS * rounding, least * (size - x))
        ]
        return min(crossings, default=None)

    def _by_forward(self, limit_bytes: int) -> int:
        """As far as the forward's bytes allow to go, while the optimizer's peak hides those of the samples."""
        size, taken = self.forwards[-1]
        each = self._forward_each()
        if each <= 0:
            return 0
        crossing = size + (limit_bytes - (self.resting_bytes or 0) - taken) / each
        return min(_MAX_GROWTH_BY_FORWARD * size, int(_SHARE_OF_FORWARD_CROSSING * crossing))

    def _forward_each(self) -> float:
        """Bytes a sample adds to the forward; all of the forward's where only one size was tried."""
        size, taken = self.forwards[-1]
        if len(self.forwards) == 1:
            return taken / size
        first, least = self.forwards[0]
        return (taken - least) / (size - first)

    def _distant_point(self) -> tuple[int, int]:
        """The nearest point at most three quarters as large as the last, so that rounding does not tilt the line."""
        distant = [point for point in self.points[:-1] if 4 * point[0] <= 3 * self.points[-1][0]]
        return distant[-1] if distant else self.points[0]

    def _beyond_flat(self, peak: int, limit_bytes: int) -> bool:
        """Whether a peak is clearly above that of the first size."""
        first = self.points[0][1]
        return peak - first > max(_CLEAR_RISE_SEGMENTS * _rounding(limit_bytes), _NOISE_SHARE_OF_FIRST_PEAK * first)


def _rounding(limit_bytes: int) -> int:
    """A segment, or less where the limit is too small to have any."""
    return min(SEGMENT_BYTES, limit_bytes // 512)
