"""Whether a size really trains, and the largest that does: without any finder, each size in a process of its own."""

from __future__ import annotations

from batchfinder.measure.oom import classify
from benchmarks.peer.isolated import Failed, isolated
from benchmarks.peer.work import Work

SECONDS = 300
"""What a training of a few steps may take."""

AROUND = 3
"""So many sizes above the answer must all fail."""


def trains(work: Work, driver: str, batch_size: int) -> bool:
    """Whether a size trains, in a fresh process.

    Args:
        work: what is trained.
        driver: `loop` or `trainer`.
        batch_size: the size.

    Raises:
        Failed: something else went wrong than the size.
    """
    if batch_size < 1:
        return False
    if work.card is not None:
        return work.card.trains(batch_size)
    found: bool = isolated(_trains, work, driver, batch_size, seconds=SECONDS, device=work.device)
    return found


def largest(work: Work, driver: str) -> int:
    """The largest size that trains, found without any finder: doubled until it fails, then halved.

    Args:
        work: what is trained.
        driver: `loop` or `trainer`.
    """
    low, high = 0, 1
    while trains(work, driver, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trains(work, driver, middle) else (low, middle)
    above = [low + more for more in range(2, AROUND + 1) if trains(work, driver, low + more)]
    return max([low, *above])


def _trains(work: Work, driver: str, batch_size: int) -> bool:
    work.begin()
    error: Exception | None = None
    try:
        if driver == "trainer":
            from benchmarks.peer.trainer import train

            train(work, batch_size)
        else:
            work.training().train(batch_size)
    except Exception as caught:
        error = caught
    work.end()
    if error is None:
        return True
    if classify(error, device=work.device) is None:
        raise Failed(str(error)) from error
    return False
