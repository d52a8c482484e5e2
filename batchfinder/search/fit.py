"""Straight lines through measured peaks, to say where they cross a limit."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.outcome import Trial
from batchfinder.units import MIB

SEGMENT_BYTES = 20 * MIB
"""Steps in which the CUDA caching allocator takes memory for requests of 1 to 10 MiB.

Source: `kLargeBuffer` of PyTorch's CUDACachingAllocator.
"""

_FLAT_GROWTH = 16
"""How far to go on peaks that hardly grow: at small sizes the optimizer's peak, which is flat, hides the samples'."""

_CLEAR_RISE = 4
"""Segments by which the last two peaks must differ for the line through them to count."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Peaks of the sizes that ran, smallest first, and the lines through two of them.

    A training step's peak is affine in the batch size: weights, gradients and optimizer state, plus a constant number
    of bytes per sample. What the device reports moves in segments, so the line is drawn as steep as one segment of
    rounding allows: a guess that is too low costs a probe that runs, one too high costs an out-of-memory.

    Attributes:
        points: (batch size, peak bytes) of each size that ran.
    """

    points: tuple[tuple[int, int], ...] = ()

    def add(self, trial: Trial) -> Fit:
        """Take in a trial; one that failed, or whose peak is unknown, adds nothing."""
        seen = trial.measurement
        peak = seen.peak_allocated_bytes if seen.peak_reserved_bytes is None else seen.peak_reserved_bytes
        if not trial.fits or peak is None:
            return self
        return Fit((*self.points, (trial.batch_size, peak)))

    def crossing(self, limit_bytes: int) -> int | None:
        """The largest size whose peak the line puts within the limit.

        One point is joined to the origin, as if nothing but samples took memory: a guess that errs on the low side. Two
        whose peaks differ by less than a segment say little, so the line is followed to `_FLAT_GROWTH` times the size.

        Where the last two peaks rise clearly, the line through them is tried too, and the lower crossing holds: on a
        curve that is flat at first and then rises, a line that begins on the flat part says too much.

        Args:
            limit_bytes: bytes a peak may have.

        Returns:
            The size; None when there is nothing to fit or the peaks fall.
        """
        if not self.points or self.points[-1][1] <= 0:
            return None
        size, peak = self.points[-1]
        if len(self.points) == 1:
            return size * limit_bytes // peak
        apart = [point for point in self.points[:-1] if 4 * point[0] <= 3 * size]
        rounding = min(SEGMENT_BYTES, limit_bytes // 512)
        lines = [apart[-1] if apart else self.points[0]]
        if peak - self.points[-2][1] > _CLEAR_RISE * rounding:
            lines.append(self.points[-2])
        rise = peak - lines[0][1] + rounding
        if rise <= 0:
            return None
        crossing = min((limit_bytes - peak) * (size - x) // (peak - y + rounding) for x, y in lines) + size
        return min(crossing, _FLAT_GROWTH * size) if rise <= 2 * rounding else crossing
