"""One peer's search and the check of its answer, each in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from batchfinder.measure.oom import classify
from benchmarks.peer.finders import PEERS, Peer
from benchmarks.peer.work import TrainingLoop, Work

_SECONDS = 300
"""The time limit of a search, and of the training that checks its answer."""

_FAILURES_ABOVE = 3
"""So many sizes above the largest must not train."""


class MeasurementFailed(Exception):
    """A search or a training raised, died or took too long."""


def isolated(function: Callable[..., Any], *arguments: Any, seconds: float, device: str = "cpu") -> Any:
    """Call a function silently in a process of its own, and return what it returns.

    Args:
        function: what to call.
        arguments: its arguments.
        seconds: the time limit.
        device: `cpu` for a fork, which has all imports already; `cuda`, which a fork cannot use, for a new process.

    Raises:
        MeasurementFailed: it raised, died, or took too long.
    """
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise MeasurementFailed(f"timed out after {seconds:g} s")
        answer, error = receiver.recv()
    except EOFError:
        process.join()
        raise MeasurementFailed(f"the process died ({process.exitcode})") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if error is not None:
        raise MeasurementFailed(error)
    return answer


def _call(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        sender.send((function(*arguments), None))
    except BaseException as error:
        sender.send((None, f"{type(error).__name__}: {error}".partition("\n")[0][:200]))


def row(peer: Peer, work: Work, true: int) -> dict[str, Any]:
    """Search, and check the answer; JSON values.

    Args:
        peer: who searches.
        work: what is trained, with a new meter.
        true: the largest size that trains, or the cap if that is smaller.
    """
    if peer.version is None:
        return {"peer": peer.name, "failed": "not installed"}
    try:
        found = isolated(search, peer.name, work, seconds=_SECONDS, device=work.device)
        ran = trains(work, peer.driver, found["returned"])
    except MeasurementFailed as failure:
        return {"peer": peer.name, "failed": str(failure)}
    return {"peer": peer.name, **found, "true": true, "share": round(found["returned"] / true, 4), "trains": ran}


def search(name: str, work: Work) -> dict[str, Any]:
    """A peer's search, by its name, in this process: its answer and what the meter counted, as JSON values."""
    (peer,) = (peer for peer in PEERS if peer.name == name)
    work.begin()
    found = peer.find(work)
    counts = work.meter.counts
    return {
        "returned": found.batch_size,
        "probes": len(counts.tries),
        "sizes": len(set(counts.tries)),
        "steps": counts.steps,
        "out_of_memory": len(counts.failed),
        "sizes_failed": len(set(counts.failed)),
        "tried": counts.tries,
        "seconds": round(work.seconds, 2),
        "changed": list(found.changed),
    }


def trains(work: Work, driver: str, batch_size: int) -> bool:
    """Whether a size trains, without any finder: in a `loop` or a `trainer`, or on the simulated card.

    Raises:
        MeasurementFailed: it failed for another reason than memory.
    """
    if batch_size < 1:
        return False
    if work.card is not None:
        return work.card.trains(batch_size)
    ran: bool = isolated(_trains, work, driver, batch_size, seconds=_SECONDS, device=work.device)
    return ran


def _trains(work: Work, driver: str, batch_size: int) -> bool:
    work.begin()
    error: Exception | None = None
    try:
        if driver == "trainer":
            from benchmarks.peer.trainer import train

            train(work, batch_size)
        else:
            TrainingLoop(work).train(batch_size)
    except Exception as caught:
        error = caught
    work.end()
    if error is None:
        return True
    if classify(error, device=work.device) is None:
        raise MeasurementFailed(str(error)) from error
    return False


def largest(work: Work, driver: str) -> int:
    """The largest size that trains, by doubling and bisection, with `_FAILURES_ABOVE` sizes above it that do not."""
    low, high = 0, 1
    while trains(work, driver, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trains(work, driver, middle) else (low, middle)
    above = [low + more for more in range(2, _FAILURES_ABOVE + 1) if trains(work, driver, low + more)]
    return max([low, *above])
