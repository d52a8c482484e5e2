"""batchfinder's tune_batch_size, with the defaults but for the cache: nothing is known from an earlier run."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from benchmarks.peer.contract import Found, Peer
from benchmarks.peer.state import changed
from benchmarks.peer.work import Work


def _find(work: Work, tolerance: float) -> Found:
    from batchfinder import tune_batch_size

    training = work.training()
    before = training.state()
    card = nullcontext() if work.card is None else work.card.stands_in("batchfinder.loop.tune.memory_of")
    with card:
        found = tune_batch_size(
            training.step,
            lambda batch_size, seq_len: work.batch(batch_size),
            [training.model, training.optimizer],
            max_batch_size=work.cap,
            tolerance=tolerance,
            cache=False,
        )
    work.end()
    return Found(found.batch_size, tuple(changed(before, training.state())))


PEERS = (
    Peer("batchfinder loop", "batchfinder", "loop", partial(_find, tolerance=0.01), "within 1 % by design"),
    Peer("batchfinder loop, exact", "batchfinder", "loop", partial(_find, tolerance=0.0), "tolerance=0"),
)
