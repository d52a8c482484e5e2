"""From an answer to a row."""

from __future__ import annotations

import pytest

from batchfinder.cli.main import build_parser
from batchfinder.cli.sweep_cells import Cell, row_of
from batchfinder.cli.sweep_request import read_request
from batchfinder.report.sweep import SweepRow
from batchfinder.results import Measurement, SearchResult, Shape, Stop, Trial, Verdict
from batchfinder.training.spec import WorkloadFacts

FACTS = WorkloadFacts("f" * 64, 512, "tokens", False, {"torch": "2.13.0"})


def trial(size: int, verdict: Verdict = Verdict.FITS) -> Trial:
    """A size and what came of it."""
    return Trial(size, Shape(64), Measurement(verdict, 10 * size, 20 * size, message="no" if size == 1 else ""))


def row(answer: int, *trials: Trial, cached: bool = False, options: str = "") -> SweepRow:
    """The row of a measured answer."""
    request = read_request(build_parser().parse_args(["sweep", "--no-cache", *options.split()]))
    measurement = next(each.measurement for each in trials if each.batch_size == max(1, answer))
    outcome = SearchResult(Shape(64), answer, Stop.EXACT, measurement, trials, "measured")
    return row_of(Cell("bert-base", FACTS, request.cards[0], outcome, () if cached else trials, 1.5, cached), request)


@pytest.mark.parametrize("verdict", [Verdict.THRASHING, Verdict.SIZE_CEILING, Verdict.OUT_OF_MEMORY])
def test_what_stopped_it(verdict: Verdict) -> None:
    """It is the smallest size that failed above the answer which is named, and no smaller one, also from the cache."""
    trials = [trial(2, Verdict.HOST_OUT_OF_MEMORY), trial(4), trial(8, Verdict.HOST_OUT_OF_MEMORY), trial(5, verdict)]
    assert row(4, *trials).stopped_by == row(4, *trials, cached=True).stopped_by == verdict.name.lower()
    assert row(4, trial(4)).stopped_by is None


def test_trials_are_counted() -> None:
    """Those of this run, and how many of them failed; none for an answer from the cache, which says who found it."""
    trials = trial(4), trial(8, Verdict.OUT_OF_MEMORY), trial(5, Verdict.OUT_OF_MEMORY)
    fresh, cached = row(4, *trials), row(4, *trials, cached=True)
    assert (fresh.source, fresh.found_by, fresh.trials, fresh.failed_trials) == ("measured", "measured", 3, 2)
    assert (cached.source, cached.found_by, cached.trials, cached.failed_trials) == ("cache", "measured", 0, 0)


def test_words_of_a_failure_only_where_nothing_fits() -> None:
    """The device's words and no peaks for 0; peaks and no words for an answer."""
    nothing, something = row(0, trial(1, Verdict.OUT_OF_MEMORY)), row(4, trial(4))
    assert (nothing.message, nothing.peak_reserved_bytes, nothing.peak_allocated_bytes) == ("no", None, None)
    assert (something.message, something.peak_reserved_bytes, something.peak_allocated_bytes) == ("", 80, 40)


def test_the_budget_includes_the_headroom() -> None:
    """What may be used and what of it stays free are two figures."""
    found = row(4, trial(4), options="--budget 1GiB --headroom 25%")
    assert (found.budget_bytes, found.headroom_bytes) == (1 << 30, 1 << 28)
