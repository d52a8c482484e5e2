"""What is known from earlier runs: whether an answer still holds, and lowering one that did not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchfinder.find import OutcomeSlot
from batchfinder.outcome import Measurement, Outcome, Stop, Trial, Verdict

PLENTY = 0.8
"""Share of the free memory within which a known peak is far from it: a cap and not memory bounded the answer."""

SLACK = 0.01
"""Share of the memory that was free by which less may be free for an answer to be used as it is."""


@dataclass(frozen=True)
class Limits:
    """What bounds the search.

    Attributes:
        cap: the largest size of use; None for none.
        tolerance: share of the answer that may be left on the table.
        reserve_bytes: memory to keep free, in bytes.
        headroom: the same as it was asked for.
    """

    cap: int | None
    tolerance: float
    reserve_bytes: int
    headroom: float | int


def holds(outcome: Outcome, free_bytes: int) -> bool:
    """Whether an outcome can be used without trying it again: as much is free as then, or far more than it takes.

    Args:
        outcome: as it was kept.
        free_bytes: what is free now, less what is to stay free.
    """
    then, seen = outcome.free_bytes, outcome.measurement
    if seen is None and outcome.max_batch_size > 0:
        return False
    peak = None if seen is None else seen.peak_reserved_bytes
    if peak is not None and peak <= PLENTY * free_bytes:
        return True
    return then is not None and free_bytes >= then - int(SLACK * then)


def lower(slot: OutcomeSlot, batch_size: int, message: str) -> int:
    """Lower a record that training has proved wrong; the next start tries the new size before it uses it.

    Args:
        slot: where the record is.
        batch_size: the size that ran out of memory.
        message: the device's own words.

    Returns:
        The new size: 5 % less, and at least one sample less.
    """
    lowered = max(0, min(batch_size - 1, int(0.95 * batch_size)))
    known = slot.get()
    if known is not None and known.max_batch_size > lowered:
        failed = Trial(batch_size, known.shape, Measurement(Verdict.OUT_OF_MEMORY, message=message))
        slot.put(
            replace(
                known,
                max_batch_size=lowered,
                stop=Stop.TOLERANCE,
                measurement=None,
                trials=(*(trial for trial in known.trials if trial.batch_size < batch_size), failed),
            )
        )
    return lowered
