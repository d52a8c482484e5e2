"""Whether a cached result holds, whether it is outgrown, and how it is lowered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchfinder.cache.validity import holds, lower, outgrown
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict

RAN = Measurement(Verdict.FITS, peak_reserved_bytes=990)
FAILED = Trial(129, Shape(), Measurement(Verdict.OUT_OF_MEMORY))
KNOWN = SearchResult(Shape(), 128, StopReason.EXACT, RAN, (Trial(128, Shape(), RAN), FAILED), free_bytes=1000)


@pytest.mark.parametrize(
    ("free_bytes", "answer"), [(1000, True), (991, True), (980, False), (1300, True), (500, False)]
)
def test_it_holds_while_as_much_is_free(free_bytes: int, answer: bool) -> None:
    """Or far more than it takes."""
    assert holds(KNOWN, free_bytes) is answer


def test_it_holds_with_less_memory_where_it_takes_little() -> None:
    """A cap bounded it."""
    assert holds(replace(KNOWN, measurement=Measurement(Verdict.FITS, peak_reserved_bytes=300)), 400)


def test_0_and_what_was_lowered_never_hold() -> None:
    """They are tried."""
    assert not holds(replace(KNOWN, max_batch_size=0, measurement=FAILED.measurement), 1000)
    assert not holds(replace(KNOWN, measurement=None), 1000)


@pytest.mark.parametrize(("free_bytes", "answer"), [(1000, False), (1040, False), (1060, True), (500, False)])
def test_it_is_outgrown_where_more_is_free(free_bytes: int, answer: bool) -> None:
    """By more than what differs from one start to the next."""
    assert outgrown(KNOWN, free_bytes) is answer


def test_what_memory_did_not_bound_is_not_outgrown() -> None:
    """A cap, or a failure at a size that would have fitted by far."""
    assert not outgrown(replace(KNOWN, stop=StopReason.CAP), 5000)
    assert not outgrown(replace(KNOWN, measurement=Measurement(Verdict.FITS, peak_reserved_bytes=100)), 5000)
    two = Trial(2, Shape(), FAILED.measurement)
    one = replace(
        KNOWN, max_batch_size=1, trials=(two,), measurement=Measurement(Verdict.FITS, peak_reserved_bytes=500)
    )
    assert outgrown(one, 5000)


@pytest.mark.parametrize(("peak", "answer"), [(990, False), (950, False), (930, True), (None, False)])
def test_it_is_outgrown_where_a_step_takes_less(peak: int | None, answer: bool) -> None:
    """By as much as memory that is free besides; where one of the peaks is not known nothing tells."""
    again = Measurement(Verdict.FITS, peak_reserved_bytes=peak)
    assert outgrown(KNOWN, 1000, again) is answer
    assert not outgrown(replace(KNOWN, measurement=None), 1000, again)
    assert not outgrown(KNOWN, 800, again)


class CacheEntry:
    """A place for one result."""

    def __init__(self, result: SearchResult | None) -> None:
        self.result = result

    def get(self) -> SearchResult | None:
        return self.result

    def put(self, result: SearchResult) -> None:
        self.result = result


def test_each_further_time_it_is_lowered_by_twice_the_share() -> None:
    """5 % first, up to half: a few starts are enough, for small sizes too."""
    entry, size, sizes = CacheEntry(replace(KNOWN, max_batch_size=20)), 20, []
    while size:
        size = lower(entry, size, "no room")
        sizes.append(size)
        assert entry.result is not None
        # The next start certifies it.
        entry.put(replace(entry.result, measurement=RAN, trials=(*entry.result.trials, Trial(size, Shape(), RAN))))
    assert sizes == [19, 17, 13, 7, 3, 1, 0]


def test_a_recovery_lowers_it_to_the_size_it_went_on_with() -> None:
    """Not to another one; the failure is kept in the device's words."""
    entry = CacheEntry(KNOWN)
    assert lower(entry, 128, "no room", to=64) == 64
    assert entry.result is not None
    assert (entry.result.max_batch_size, entry.result.measurement) == (64, None)
    assert entry.result.trials[-1].measurement.message == "in training: no room"


def test_a_smaller_record_stays() -> None:
    """It was lowered by somebody else already."""
    entry = CacheEntry(replace(KNOWN, max_batch_size=50))
    assert lower(entry, 128, "no room") == 121
    assert entry.result is not None
    assert entry.result.max_batch_size == 50
    assert lower(CacheEntry(None), 128, "no room") == 121
