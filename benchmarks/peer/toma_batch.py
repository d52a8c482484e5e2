"""toma.batch, as its README has it."""

from __future__ import annotations

from functools import partial

from benchmarks.peer.contract import Found, Peer
from benchmarks.peer.state import changed
from benchmarks.peer.work import Work

LARGE = 8192


def _find(work: Work, start: int) -> Found:
    from toma import toma

    training = work.training()
    before = training.state()

    @toma.batch(initial_batchsize=start if work.cap is None else min(start, work.cap))
    def train(batchsize: int) -> int:
        return training.train(batchsize)

    found = train()
    work.end()
    return Found(found, tuple(changed(before, training.state())))


_NOTE = "only downwards, by halves; the call is the training itself, so nothing is put back by design"

PEERS = (
    Peer("toma, from 512", "toma", "loop", partial(_find, start=512), _NOTE),
    Peer(f"toma, from {LARGE}", "toma", "loop", partial(_find, start=LARGE), _NOTE),
)
