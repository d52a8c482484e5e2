"""A search that does not trust small peaks, and knows that each try leaves less room for the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from batchfinder.outcome import Trial
from batchfinder.search import Wrapper
from batchfinder.search.protocol import S

RESOLUTION = 64
"""Growth of less than one part in this many of the limit says nothing on a CPU.

The kernel counts resident pages in batches, per thread, and freed memory that the process kept is used again unseen.
"""


def _nothing() -> int:
    return 0


@dataclass(frozen=True)
class CoarsePeaks(Wrapper[S]):
    """Raises peaks for the fit alone: small ones to a floor, and all by what tries have left in the process for good.

    A guess that is too low costs a probe that runs; one that is too high by what the tries before it left costs a
    failure and a bisection, whose every probe leaves more.

    Attributes:
        floor_bytes: the least that a peak counts as.
        lost_bytes: asked after each try, by how much the room for a peak has shrunk since the search began.
    """

    floor_bytes: int
    lost_bytes: Callable[[], int] = _nothing

    def update(self, state: S, trial: Trial) -> S:
        """Pass on, with the peak at least at the floor, and what was lost on top."""
        seen = trial.measurement
        if trial.fits and seen.peak_reserved_bytes is not None:
            peak = max(seen.peak_reserved_bytes, self.floor_bytes) + max(0, self.lost_bytes())
            trial = replace(trial, measurement=replace(seen, peak_reserved_bytes=peak))
        return self.search.update(state, trial)
