"""accelerate's find_executable_batch_size: calls the training with less and less until it runs."""

from __future__ import annotations

from functools import partial

from benchmarks.peer.contract import Found, Peer
from benchmarks.peer.state import changed
from benchmarks.peer.work import Work

LARGE = 8192
"""Where a user begins who wants the largest size and not one that runs."""


def _find(work: Work, start: int) -> Found:
    from accelerate.utils import find_executable_batch_size

    training = work.training()
    before = training.state()
    start = start if work.cap is None else min(start, work.cap)
    found = find_executable_batch_size(training.train, starting_batch_size=start)()
    work.end()
    return Found(found, tuple(changed(before, training.state())))


_NOTE = "only downwards; the call is the training itself, so nothing is put back by design"

PEERS = (
    Peer("accelerate, from 128", "accelerate", "loop", partial(_find, start=128), _NOTE),
    Peer(f"accelerate, from {LARGE}", "accelerate", "loop", partial(_find, start=LARGE), _NOTE),
)
