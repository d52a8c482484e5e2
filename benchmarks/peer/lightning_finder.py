"""Lightning's BatchSizeFinder, with its own defaults."""

from __future__ import annotations

from functools import partial

from benchmarks.peer.contract import Found, Peer
from benchmarks.peer.state import changed
from benchmarks.peer.work import Work


def _find(work: Work, mode: str) -> Found:
    from pytorch_lightning.callbacks import BatchSizeFinder

    from benchmarks.peer.trainer import state_at_start

    limits = {} if work.cap is None else {"max_val": work.cap}
    module, state = state_at_start(work, [BatchSizeFinder(mode=mode, **limits)], 2)
    work.end()
    work.seed()
    _, without = state_at_start(work, [], module.batch_size)
    return Found(module.batch_size, tuple(changed(without, state)))


PEERS = (
    Peer(
        "Lightning power",
        "pytorch-lightning",
        "trainer",
        partial(_find, mode="power"),
        "powers of two by design; three steps per size",
    ),
    Peer(
        "Lightning binsearch",
        "pytorch-lightning",
        "trainer",
        partial(_find, mode="binsearch"),
        "takes 5 % off what it found by design; three steps per size",
    ),
)
