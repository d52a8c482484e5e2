"""A search that does not trust small peaks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchfinder.outcome import Trial
from batchfinder.search import Wrapper
from batchfinder.search.protocol import S

RESOLUTION = 64
"""Growth of less than one part in this many of the limit says nothing on a CPU.

The kernel counts resident pages in batches, per thread, and freed memory that the process kept is used again unseen.
"""


@dataclass(frozen=True)
class CoarsePeaks(Wrapper[S]):
    """Raises small peaks to a floor for the fit alone: a guess that is too low costs a probe that runs.

    Attributes:
        floor_bytes: the least that a peak counts as.
    """

    floor_bytes: int

    def update(self, state: S, trial: Trial) -> S:
        """Pass on, with the peak at least at the floor."""
        seen = trial.measurement
        if trial.fits and seen.peak_reserved_bytes is not None and seen.peak_reserved_bytes < self.floor_bytes:
            trial = replace(trial, measurement=replace(seen, peak_reserved_bytes=self.floor_bytes))
        return self.search.update(state, trial)
