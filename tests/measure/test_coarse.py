"""What the fit is told of peaks on a CPU."""

from __future__ import annotations

from batchfinder.find import find_max_batch_size
from batchfinder.measure.device_memory import CoarsePeaks
from batchfinder.results import Measurement, SearchResult, Shape, Verdict
from batchfinder.search import Secant

LIMIT = 1000


class Leaking:
    """A process that takes 50 and 8 for each sample, and keeps `leak` of each try for good."""

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(self, leak: int) -> None:
        self.leak, self.lost = leak, 0

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        peak, room = 50 + 8 * batch_size, LIMIT - self.lost
        self.lost += self.leak
        return Measurement(Verdict.FITS, None, peak) if peak <= room else Measurement(Verdict.OUT_OF_MEMORY)


def searched(knowing: bool, floor: int = 0, leak: int = 10) -> SearchResult:
    """The outcome where each try leaves something, with and without knowing of it."""
    probe = Leaking(leak)
    search = CoarsePeaks(Secant(LIMIT), floor, (lambda: probe.lost) if knowing else (lambda: 0))
    return find_max_batch_size(probe, Shape(), search=search)


def failures(outcome: SearchResult) -> int:
    """How many tries failed."""
    return sum(not trial.fits for trial in outcome.trials)


def test_a_search_that_knows_what_tries_leave_takes_fewer() -> None:
    """One failure at the end instead of a bisection, and a larger answer, since fewer tries leave less."""
    ignorant, knowing = searched(knowing=False), searched(knowing=True)
    assert (failures(ignorant), failures(knowing)) == (4, 1)
    assert len(knowing.trials) < len(ignorant.trials)
    assert knowing.max_batch_size > ignorant.max_batch_size


def test_measurements_are_kept_as_they_were() -> None:
    """The floor and what was lost are for the fit alone."""
    outcome = searched(knowing=True, floor=500)
    peaks = {trial.batch_size: trial.measurement.peak_reserved_bytes for trial in outcome.trials if trial.fits}
    assert peaks == {size: 50 + 8 * size for size in peaks}
    assert outcome.measurement == Measurement(Verdict.FITS, None, 50 + 8 * outcome.max_batch_size)


def test_a_small_peak_counts_as_the_floor() -> None:
    """Of two sizes whose peaks say nothing the guess is that all takes as much as the floor, and comes out low."""
    sizes = [[trial.batch_size for trial in searched(True, floor, 0).trials][1] for floor in (0, 100, 500)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
