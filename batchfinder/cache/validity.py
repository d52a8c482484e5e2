"""Whether a cached result can still be used, and lowering one that training has proved too large."""

from __future__ import annotations

from dataclasses import replace

from batchfinder.cache.store import ResultEntry
from batchfinder.results import Measurement, SearchResult, StopReason, Trial, Verdict

_NEAR = 0.8
"""Share of the free memory from which on a peak is near it. Below, a cap and not memory bounded the answer."""

_LESS = 0.01
"""Share of the memory that was free by which less may be free now for an answer to be used without a trial."""

_MORE = 0.05
"""Share of the memory that was free by which more must be free now, or a step take less, for a new search: less would
hardly gain more than the tolerance, and what a process holds as it starts differs by some MiB from one start to the
next."""

_LOWERED = 0.05
"""Share by which an answer is lowered the first time that training runs out of memory with it."""

_IN_TRAINING = "in training: "


def holds(known: SearchResult, free_bytes: int) -> bool:
    """Whether a result can be used without a trial: as much memory is free as then, or far more than it takes.

    Args:
        known: as it was cached.
        free_bytes: what is free now, less the headroom.
    """
    if known.max_batch_size == 0 or known.measurement is None:  # nothing fitted, or it was lowered
        return False
    peak = known.measurement.peak_reserved_bytes
    if peak is not None and peak <= _NEAR * free_bytes:
        return True
    return known.free_bytes is not None and free_bytes >= (1 - _LESS) * known.free_bytes


def outgrown(known: SearchResult, free_bytes: int, again: Measurement | None = None) -> bool:
    """Whether memory bounded a result and more of it is free now, or a step takes less, so that a larger size may run.

    Args:
        known: as it was cached.
        free_bytes: what is free now, less the headroom.
        again: of the size, which has been tried again; None before.
    """
    then, seen = known.free_bytes, known.measurement
    room = float(free_bytes)
    if again is not None:
        if seen is None or not seen.peak_reserved_bytes or not again.peak_reserved_bytes:
            return False
        room *= seen.peak_reserved_bytes / again.peak_reserved_bytes
    if known.stop is StopReason.CAP or then is None or room <= (1 + _MORE) * then:
        return False
    failed = min((t.batch_size for t in known.trials if not t.fits and t.batch_size > known.max_batch_size), default=0)
    if seen is None or seen.peak_reserved_bytes is None or not failed or not known.max_batch_size:
        return True
    # The next size up would have taken this much at most. Where that was far from the limit, something else failed.
    return seen.peak_reserved_bytes * failed / known.max_batch_size >= _NEAR * then


def lower(entry: ResultEntry, batch_size: int, message: str, to: int | None = None) -> int:
    """Lower a cached result with which training ran out of memory. The next start tries the new size before it uses it.

    Args:
        entry: where it is cached.
        batch_size: the size that ran out of memory.
        message: the device's own words.
        to: the size that the training went on with. None for 5 % less, or one sample; each further time it is twice the
            share of the time before, up to half, so that a few starts are enough.

    Returns:
        The new size.

    Raises:
        CacheFailed: the cache cannot be read or written.
    """
    known = entry.get()
    trials = () if known is None else known.trials
    times = sum(trial.measurement.message.startswith(_IN_TRAINING) for trial in trials)
    share = min(_LOWERED * 2**times, 0.5)
    lowered = max(0, min(batch_size - 1, int((1 - share) * batch_size))) if to is None else to
    if known is not None and known.max_batch_size > lowered:
        failed = Trial(batch_size, known.shape, Measurement(Verdict.OUT_OF_MEMORY, message=_IN_TRAINING + message))
        still = (trial for trial in trials if trial.batch_size < batch_size or not trial.fits)
        entry.put(
            replace(
                known,
                max_batch_size=lowered,
                stop=StopReason.TOLERANCE,
                measurement=None,
                trials=(*(trial for trial in still if trial.batch_size != batch_size), failed),
                throughput=None,
            )
        )
    return lowered
