"""The driver: what it passes on, what it keeps, what it lets through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchfinder.find import find_max_batch_size
from batchfinder.probe import FunctionProbe
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict
from batchfinder.search import Capped, Doubling, Headroom, Secant

SHAPE = Shape(seq_len=128)


class CacheEntry:
    """A cache entry in memory."""

    def __init__(self, outcome: SearchResult | None = None) -> None:
        self.outcome = outcome

    def get(self) -> SearchResult | None:
        return self.outcome

    def put(self, outcome: SearchResult) -> None:
        self.outcome = outcome


class RaisingProbe:
    """Runs up to 4 and raises above."""

    source = "measured"
    unmodelled = ()

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        if batch_size > 4:
            raise self.error
        return Measurement(Verdict.FITS)


def five() -> FunctionProbe:
    """A probe on which 5 is the answer at length 128."""
    return FunctionProbe(lambda size, shape: 10 * size + (shape.seq_len or 0), 128 + 55)


def test_outcome():
    """The outcome holds the answer's own measurement, every trial in order, and where it came from."""
    probe = five()
    probe.source, probe.unmodelled = "measured", ("cuDNN workspaces",)
    outcome = find_max_batch_size(probe, SHAPE)
    assert outcome == SearchResult(
        shape=SHAPE,
        max_batch_size=5,
        stop=StopReason.EXACT,
        measurement=Measurement(Verdict.FITS, 178, 178),
        trials=tuple(Trial(size, SHAPE, probe(size, SHAPE)) for size in (1, 2, 4, 8, 6, 5)),
        source="measured",
        unmodelled=("cuDNN workspaces",),
    )


def test_nothing_runs():
    """0 is an answer, and its measurement is the failure of the smallest size tried."""
    outcome = find_max_batch_size(FunctionProbe(lambda size, shape: 300, 200), SHAPE)
    assert (outcome.max_batch_size, outcome.measurement, len(outcome.trials)) == (0, outcome.trials[0].measurement, 1)
    assert outcome.measurement.message == "needs 300 bytes of 200"


def test_on_trial():
    """`on_trial` sees each trial as it happens, as the search counts it."""
    seen: list[Trial] = []
    search = Headroom(Doubling(), limit_bytes=183, headroom_bytes=20)
    outcome = find_max_batch_size(five(), SHAPE, search=search, on_trial=seen.append)
    assert tuple(seen) == outcome.trials
    assert [trial.measurement.verdict for trial in seen if trial.batch_size == 4] == [Verdict.HEADROOM]
    assert outcome.max_batch_size == 3


def test_cache_is_filled():
    """An outcome is put into the cache as it is returned."""
    entry = CacheEntry()
    assert find_max_batch_size(five(), SHAPE, cache=entry) == entry.outcome


def test_cache_is_used():
    """A cached outcome comes back without a probe, marked as such; the record is left as it is."""
    kept = find_max_batch_size(five(), SHAPE)
    entry = CacheEntry(kept)
    outcome = find_max_batch_size(RaisingProbe(AssertionError("probed")), SHAPE, cache=entry, on_trial=pytest.fail)
    assert outcome == replace(kept, source="cache", trials=())
    assert entry.outcome is kept


def test_cached_zero():
    """A cached 0 is an answer too."""
    kept = find_max_batch_size(FunctionProbe(lambda size, shape: 300, 200), SHAPE)
    outcome = find_max_batch_size(RaisingProbe(AssertionError("probed")), SHAPE, cache=CacheEntry(kept))
    assert (outcome.max_batch_size, outcome.source) == (0, "cache")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("mat1 and mat2 shapes cannot be multiplied")])
def test_errors_propagate(error):
    """An interrupt or a bug in the user's code comes through unchanged, after the trials so far; nothing is cached."""
    entry, seen = CacheEntry(), []
    with pytest.raises(type(error)) as caught:
        find_max_batch_size(RaisingProbe(error), SHAPE, cache=entry, on_trial=seen.append)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert [trial.batch_size for trial in seen] == [1, 2, 4]
    assert entry.outcome is None


def test_on_trial_may_stop_it():
    """What `on_trial` raises comes through, so a caller can stop a search."""
    with pytest.raises(KeyboardInterrupt):
        find_max_batch_size(five(), SHAPE, on_trial=lambda trial: (_ for _ in ()).throw(KeyboardInterrupt()))


def test_one_search_serves_many_shapes():
    """A search keeps nothing from one use to the next."""
    search = Doubling()
    answers = [
        find_max_batch_size(five(), Shape(seq_len), search=search).max_batch_size for seq_len in (128, 8, 180, 128)
    ]
    assert answers == [5, 17, 0, 5]


class Failing:
    """Runs up to 40 samples, says how often each size was tried, and fails at some sizes the first time by accident."""

    unmodelled = ()

    def __init__(self, verdict: Verdict, accidents: tuple[int, ...] = (), source: str = "measured") -> None:
        self.verdict = verdict
        self.accidents = accidents
        self.source = source
        self.tried: list[int] = []

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        self.tried.append(batch_size)
        accident = batch_size in self.accidents and self.tried.count(batch_size) == 1
        if accident or batch_size > 40:
            return Measurement(self.verdict)
        return Measurement(Verdict.FITS, 10 * batch_size, 10 * batch_size)


@pytest.mark.parametrize("verdict", [Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY])
def test_an_accident_is_forgotten(verdict):
    """On a real device a failure is believed when it comes twice; one trial is reported of a size."""
    probe = Failing(verdict, accidents=(2, 16, 36))
    outcome = find_max_batch_size(probe, SHAPE)
    assert outcome.max_batch_size == 40
    assert probe.tried == [1, 2, 2, 4, 8, 16, 16, 32, 64, 64, 48, 48, 40, 44, 44, 42, 42, 41, 41]
    assert [trial.batch_size for trial in outcome.trials] == [1, 2, 4, 8, 16, 32, 64, 48, 40, 44, 42, 41]


@pytest.mark.parametrize(
    ("verdict", "source"),
    [(Verdict.SIZE_CEILING, "measured"), (Verdict.THRASHING, "measured"), (Verdict.OUT_OF_MEMORY, "simulated")],
)
def test_what_cannot_pass_is_believed_at_once(verdict, source):
    """Neither a kernel's ceiling, nor what recurs step after step, nor a simulated failure is an accident."""
    probe = Failing(verdict, source=source)
    assert find_max_batch_size(probe, SHAPE).max_batch_size == 40
    assert len(set(probe.tried)) == len(probe.tried)


def test_a_failure_that_was_expected_is_believed_at_once():
    """A search that knows from peaks what cannot fit tries the size that ends it a single time."""
    probe = Failing(Verdict.OUT_OF_MEMORY)
    outcome = find_max_batch_size(probe, SHAPE, search=Capped(Secant(limit_bytes=409, tolerance=0.0, predicted=40), 99))
    assert (outcome.max_batch_size, outcome.stop) == (40, StopReason.EXACT)
    assert probe.tried.count(41) == 1
    again = Failing(Verdict.OUT_OF_MEMORY, accidents=(34,))
    assert find_max_batch_size(again, SHAPE, search=Secant(409, 0.0, predicted=40)).max_batch_size == 40
    assert again.tried[:2] == [34, 34]


def test_a_search_goes_on_from_earlier_trials():
    """What is known narrows it and is not tried again; the new trials alone are in the result."""
    probe = five()
    known = [Trial(size, SHAPE, probe(size, SHAPE)) for size in (3, 7)]
    found = find_max_batch_size(probe, SHAPE, trials=known)
    assert (found.max_batch_size, {trial.batch_size for trial in found.trials} & {3, 7}) == (5, set())
    assert all(3 < trial.batch_size < 7 for trial in found.trials)
    ended = find_max_batch_size(probe, SHAPE, trials=[Trial(size, SHAPE, probe(size, SHAPE)) for size in (5, 6)])
    assert (ended.max_batch_size, ended.trials, ended.measurement) == (5, (), probe(5, SHAPE))
