"""What a search knows for certain: the largest size seen to run, the smallest seen to fail above it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchfinder.outcome import Stop, Trial
from batchfinder.search.bounds import Bounds


@dataclass(frozen=True, slots=True)
class Bracket:
    """The open interval still in question.

    Every size probed lies at or outside its ends. So a search that only proposes sizes inside never probes one twice,
    and answers with a size that ran, whatever the memory curve looks like.

    Attributes:
        bounds: the sizes that may be tried.
        low: the largest size that was probed and ran; 0 before any did.
        high: the smallest size that was probed and failed; None before any did.
    """

    bounds: Bounds
    low: int = 0
    high: int | None = None

    def update(self, trial: Trial) -> Bracket:
        """Narrow by a trial of a size inside."""
        return replace(self, low=trial.batch_size) if trial.fits else replace(self, high=trial.batch_size)

    def inside(self, size: int) -> int:
        """The size that may be tried, is strictly inside, and is next to `size` (below it where there is one)."""
        highest = self.bounds.last if self.high is None else self.bounds.floor(self.high - 1)
        return min(max(self.bounds.floor(size), self.bounds.after(self.low)), highest)

    def step(self) -> int:
        """The size to try when nothing is known but the bracket: twice the low end, or the middle."""
        if self.high is None:
            return self.inside(2 * self.low)
        return self.inside((self.low + self.high) // 2)

    def stop(self, tolerance: float) -> Stop | None:
        """Why the search may end here; None when it may not.

        Args:
            tolerance: largest share of the failing size that may lie between the two ends.
        """
        if self.low == self.bounds.last:
            return Stop.CAP
        if self.high is None:
            return None
        if self.high == self.bounds.after(self.low):
            return Stop.EXACT
        if self.high - self.low <= tolerance * self.high:
            return Stop.TOLERANCE
        return None

    def result(self, tolerance: float) -> tuple[int, Stop]:
        """The answer and why it stands.

        Raises:
            RuntimeError: the search has not ended.
        """
        stop = self.stop(tolerance)
        if stop is None:
            raise RuntimeError(f"asked for a result while sizes above {self.low} are still in question")
        return self.low, stop
