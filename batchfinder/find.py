"""The one driver: the search proposes, the probe measures, until the search has its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from batchfinder.probe import Probe
from batchfinder.results import SearchResult, Shape, Trial
from batchfinder.retry import retrying
from batchfinder.search import Bounds, Doubling, Search
from batchfinder.search.base import S


class ResultEntry(Protocol):
    """A place for one outcome, already keyed by everything that changes the answer."""

    def get(self) -> SearchResult | None:
        """The outcome kept here; None when there is none."""
        ...

    def put(self, outcome: SearchResult) -> None:
        """Keep an outcome here."""
        ...


def find_max_batch_size(
    probe: Probe,
    shape: Shape,
    *,
    search: Search[Any] | None = None,
    cache: ResultEntry | None = None,
    on_trial: Callable[[Trial], object] | None = None,
) -> SearchResult:
    """Find the largest batch size that runs.

    A failure on a real device that the search did not expect is believed when it comes twice. Whatever the probe or
    `on_trial` raises propagates unchanged, an interrupt too; nothing is put into the cache then.

    Args:
        probe: answers whether one size runs.
        shape: one sample's shape.
        search: which sizes to try; `Doubling()` by default, which is exact.
        cache: looked at first, and given the outcome at the end. A cached outcome is returned with the source `cache`
            and no trials, and nothing is probed.
        on_trial: called after each probe with the trial, as the search counts it.

    Returns:
        The answer, 0 when nothing runs, with its own measurement and every trial in order.

    Raises:
        InvalidValue: the search's settings leave no size to try.
    """
    known = cache.get() if cache is not None else None
    if known is not None:
        return replace(known, source="cache", trials=())
    search = Doubling() if search is None else search
    trials: list[Trial] = []
    state = search.init(shape, Bounds())
    while (batch_size := search.propose(state)) is not None:
        trial = try_size(probe, search, state, batch_size, shape)
        trials.append(trial)
        if on_trial is not None:
            on_trial(trial)
        state = search.update(state, trial)
    answer, stop = search.result(state)
    measurements = {trial.batch_size: trial.measurement for trial in trials}
    outcome = SearchResult(
        shape=shape,
        max_batch_size=answer,
        stop=stop,
        measurement=measurements[answer or min(measurements)],
        trials=tuple(trials),
        source=probe.source,
        unmodelled=probe.unmodelled,
    )
    if cache is not None:
        cache.put(outcome)
    return outcome


def try_size(probe: Probe, search: Search[S], state: S, batch_size: int, shape: Shape) -> Trial:
    """Try one size; on a real device once more where it failed and the search doubts that.

    Args:
        probe: answers whether it runs, and clears up after itself.
        search: judges and doubts.
        state: the search's, before the trial.
        batch_size: samples in the micro-batch.
        shape: one sample's shape.

    Returns:
        The last try, as the search counts it.
    """

    def once() -> Trial:
        return search.judge(Trial(batch_size, shape, probe(batch_size, shape)))

    if probe.source == "simulated":
        return once()
    return retrying((), on_result=lambda trial: search.doubts(state, trial), attempts=2, wait=0.0)(once)()
