"""The driver: the search proposes sizes, the probe measures them, until the search has its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from batchfinder.cache.store import ResultEntry
from batchfinder.probe import Probe
from batchfinder.results import SearchResult, Shape, Trial
from batchfinder.search import Bounds, Doubling, Search


def find_max_batch_size(
    probe: Probe,
    shape: Shape,
    *,
    search: Search[Any] | None = None,
    cache: ResultEntry | None = None,
    before_trial: Callable[[int], object] | None = None,
    on_trial: Callable[[Trial], object] | None = None,
    trials: Iterable[Trial] = (),
) -> SearchResult:
    """Find the largest batch size that runs.

    A failure on a real device that the search did not expect counts only if a second try fails too. Whatever the
    probe or `on_trial` raises propagates unchanged, an interrupt too; nothing is put into the cache then.

    Args:
        search: which sizes to try; `Doubling()` by default, which is exact.
        cache: read first, and given the result at the end. A cached result is returned with the source `cache`
            and no trials, and nothing is probed.
        before_trial: called before each size is probed, with the size.
        on_trial: called after each probe with the trial, as the search counts it.
        trials: what is known already: the search goes on from there, as if it had just made them.

    Returns:
        The answer, 0 when nothing runs, with its own measurement and every new trial in order.

    Raises:
        InvalidValue: the search's settings leave no size to try.
    """
    cached = cache.get() if cache is not None else None
    if cached is not None:
        return replace(cached, source="cache", trials=())
    search = Doubling() if search is None else search
    state = search.init(shape, Bounds())
    known_trials = tuple(trials)
    for trial in known_trials:
        state = search.update(state, trial)
    tried: list[Trial] = []
    while (batch_size := search.propose(state)) is not None:
        if before_trial is not None:
            before_trial(batch_size)
        trial = search.judge(Trial(batch_size, shape, probe(batch_size, shape)))
        if probe.source != "simulated" and search.should_retry(state, trial):
            trial = search.judge(Trial(batch_size, shape, probe(batch_size, shape)))
        tried.append(trial)
        if on_trial is not None:
            on_trial(trial)
        state = search.update(state, trial)
    answer, stop = search.result(state)
    measurements = {trial.batch_size: trial.measurement for trial in (*known_trials, *tried)}
    result = SearchResult(
        shape=shape,
        max_batch_size=answer,
        stop=stop,
        measurement=measurements[answer or min(measurements)],
        trials=tuple(tried),
        source=probe.source,
        unmodelled=probe.unmodelled,
    )
    if cache is not None:
        cache.put(result)
    return result
