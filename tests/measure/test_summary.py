"""What came of one shape, in words."""

from __future__ import annotations

from dataclasses import replace

from batchfinder.accumulation import plan_accumulation
from batchfinder.measure.tuner import summary
from batchfinder.results import Measurement, SearchResult, Shape, Stop, Trial, Verdict
from batchfinder.units import GIB

SEEN = Measurement(Verdict.FITS, 9 * GIB, 10 * GIB)
SHAPE = Shape(512)
FOUND = SearchResult(SHAPE, 216, Stop.EXACT, SEEN, (Trial(200, SHAPE, SEEN), Trial(216, SHAPE, SEEN)))


def test_all_of_it() -> None:
    """Size, length, peak, headroom, accumulation, tries and seconds."""
    assert summary(FOUND, plan_accumulation(1024, 216), 12 * GIB, GIB, 1.234) == (
        "batch size 216 at seq_len 512; peak 10.00 GiB of 12.00 GiB; headroom 1.00 GiB; accumulation 128 x 8 = 1024; "
        "2 probes in 1.23 s"
    )


def test_what_is_not_there_is_not_said() -> None:
    """Without a length, a peak, a headroom and a target, and with one try."""
    unknown = replace(FOUND, shape=Shape(), measurement=None, trials=FOUND.trials[:1])
    assert summary(unknown, None, 12 * GIB, 0, 0.5) == "batch size 216; limit 12.00 GiB; 1 probe in 0.50 s"


def test_where_it_comes_from() -> None:
    """From the cache, as it is or tried again."""
    cached = replace(FOUND, source="cache", trials=())
    head = "batch size 216 at seq_len 512; peak 10.00 GiB of 12.00 GiB; from the cache"
    assert summary(cached, None, 12 * GIB, 0, 0.01) == f"{head} in 0.01 s"
    certified = replace(cached, trials=FOUND.trials[1:])
    assert summary(certified, None, 12 * GIB, 0, 0.01) == f"{head}, certified with 1 probe in 0.01 s"
