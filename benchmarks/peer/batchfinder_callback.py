"""batchfinder's callback, with the defaults but for the cache: nothing is known from an earlier run."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from benchmarks.peer.contract import Found, Peer
from benchmarks.peer.state import changed
from benchmarks.peer.work import Work


def _find(work: Work, tolerance: float, predict: bool | None = None) -> Found:
    from batchfinder import BatchFinder
    from benchmarks.peer.trainer import state_at_start

    if work.card is not None and predict is None:
        predict = True  # the default on a GPU
    finder = BatchFinder(max_batch_size=work.cap, tolerance=tolerance, cache=False, predict=predict)
    hint = "batchfinder.lightning.stage_tuner.hint" if predict else None
    place = "batchfinder.lightning.stage_tuner.memory_of"
    card = nullcontext() if work.card is None else work.card.stands_in(place, hint)
    with card:
        module, state = state_at_start(work, [finder], 2)
    work.end()
    work.seed()
    _, without = state_at_start(work, [], module.batch_size)
    return Found(module.batch_size, tuple(changed(without, state)))


_PREDICTS = (
    "starts from the simulated step, as on a GPU by default; for a simulated card that prediction is exact, which for "
    "a real one it is not"
)

PEERS = (
    Peer("batchfinder callback", "batchfinder", "trainer", partial(_find, tolerance=0.01), _PREDICTS),
    Peer(
        "batchfinder callback, exact",
        "batchfinder",
        "trainer",
        partial(_find, tolerance=0.0),
        "tolerance=0",
    ),
    Peer(
        "batchfinder callback, predict=False",
        "batchfinder",
        "trainer",
        partial(_find, tolerance=0.01, predict=False),
        "without the simulated step; on a CPU that is the default",
    ),
)
