"""The finders that are compared: each package's search, called as its documentation recommends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.peer.work import NETS, VOCABULARY, TrainingLoop, Work, changed

LARGE = 8192
"""Where a user starts who wants the largest size from a finder that only goes downwards."""

_MEMORY_OF_TRAINER = "batchfinder.lightning.stage_tuner.memory_of"
_MEMORY_OF_LOOP = "batchfinder.loop.tune.memory_of"
_PREDICT = "batchfinder.lightning.stage_tuner.predict_batch_size"


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        batch_size: what it returned; 0 for none.
        changed: the parts of the training state that are not as they would be without the search.
    """

    batch_size: int
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """A way to find a batch size.

    Attributes:
        name: in tables.
        package: the distribution it comes from.
        driver: what it trains with: `loop` or `trainer`.
        find: searches, once the work has begun.
        note: what it does not do, or does by design.
    """

    name: str
    package: str
    driver: str
    find: Callable[[Work], Found]
    note: str = ""

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


def _in_loop(work: Work, search: Callable[[TrainingLoop], int]) -> Found:
    """Search with a plain loop, whose state before and after is compared."""
    training = TrainingLoop(work)
    before = training.state()
    batch_size = search(training)
    work.end()
    return Found(batch_size, changed(before, training.state()))


def _in_trainer(work: Work, callback: Any, card: AbstractContextManager[None] | None = None) -> Found:
    """Search with a callback; the state at the start of training is compared with that of a run without it."""
    from benchmarks.peer.trainer import state_at_start

    with card or nullcontext():
        module, state = state_at_start(work, [callback], 2)
    work.end()
    work.seed()
    _, without = state_at_start(work, [], module.batch_size)
    return Found(module.batch_size, changed(without, state))


def _lightning(work: Work, mode: str) -> Found:
    from pytorch_lightning.callbacks import BatchSizeFinder

    limits = {} if work.cap is None else {"max_val": work.cap}
    return _in_trainer(work, BatchSizeFinder(mode=mode, **limits))


def _start_of(work: Work, start: int) -> int:
    return start if work.cap is None else min(start, work.cap)


def _accelerate(work: Work, start: int) -> Found:
    from accelerate.utils import find_executable_batch_size

    def search(training: TrainingLoop) -> int:
        return find_executable_batch_size(training.train, starting_batch_size=_start_of(work, start))()

    return _in_loop(work, search)


def _toma(work: Work, start: int) -> Found:
    from toma import toma

    def search(training: TrainingLoop) -> int:
        @toma.batch(initial_batchsize=_start_of(work, start))
        def train(batchsize: int) -> int:
            return training.train(batchsize)

        return train()

    return _in_loop(work, search)


def _torch_max_mem(work: Work) -> Found:
    from torch_max_mem import maximize_memory_utilization

    def search(training: TrainingLoop) -> int:
        @maximize_memory_utilization()
        def train(batch_size: int) -> int:
            return training.train(batch_size)

        return train(batch_size=_start_of(work, LARGE))

    return _in_loop(work, search)


class _CountedNet(nn.Module):
    """A net whose forwards are counted, for batch-finder, which makes its own model, batches and steps."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.net = work.model()
        self.work = work
        self.config = SimpleNamespace(vocab_size=VOCABULARY)  # where batch-finder reads the range of token ids


class _TokenNet(_CountedNet):
    """batch-finder makes integers for an argument of this name."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.work.loss(self.net, input_ids)


class _FloatNet(_CountedNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work.loss(self.net, x)


def _batch_finder(work: Work) -> Found:
    from batch_finder import find_max_minibatch

    net = NETS[work.net]

    def search(training: TrainingLoop) -> int:
        found = find_max_minibatch(
            lambda: (_TokenNet if net.integer else _FloatNet)(work),
            input_shapes=(-1, *net.sample),
            device=torch.device(work.device),
            use_subprocess=False,
            delay=0.0 if work.card else None,
        )
        size = 0 if found is None else int(found[0])
        # It catches every error itself, so the meter sees none: the tries above the answer are those that failed.
        counts = work.meter.counts
        counts.failed = [tried for tried in counts.tries if tried > size]
        return size

    return _in_loop(work, search)


def _callback(work: Work, tolerance: float, predict: bool | None = None) -> Found:
    """With the defaults but for the cache, which is empty."""
    from batchfinder import BatchFinder

    if work.card is None:
        card = None
    else:
        predict = predict is None or predict  # on a GPU it is the default
        card = work.card.replacing(_MEMORY_OF_TRAINER, _PREDICT if predict else None)
    return _in_trainer(
        work, BatchFinder(max_batch_size=work.cap, tolerance=tolerance, cache=False, predict=predict), card
    )


def _loop(work: Work, tolerance: float) -> Found:
    """With the defaults but for the cache, which is empty."""
    from batchfinder import tune_batch_size

    def search(training: TrainingLoop) -> int:
        with nullcontext() if work.card is None else work.card.replacing(_MEMORY_OF_LOOP):
            return tune_batch_size(
                training.step,
                lambda batch_size, seq_len: work.batch(batch_size),
                [training.model, training.optimizer],
                max_batch_size=work.cap,
                tolerance=tolerance,
                cache=False,
            ).batch_size

    return _in_loop(work, search)


_RUNS_TRAINING = "the call is the training itself, so nothing is put back by design"

PEERS = (
    Peer(
        "Lightning power",
        "pytorch-lightning",
        "trainer",
        partial(_lightning, mode="power"),
        "powers of two by design; three steps per size",
    ),
    Peer(
        "Lightning binsearch",
        "pytorch-lightning",
        "trainer",
        partial(_lightning, mode="binsearch"),
        "takes 5 % off what it found by design; three steps per size",
    ),
    *(
        Peer(
            f"accelerate, from {start}",
            "accelerate",
            "loop",
            partial(_accelerate, start=start),
            f"only downwards; {_RUNS_TRAINING}",
        )
        for start in (128, LARGE)
    ),
    *(
        Peer(
            f"toma, from {start}",
            "toma",
            "loop",
            partial(_toma, start=start),
            f"only downwards, by halves; {_RUNS_TRAINING}",
        )
        for start in (512, LARGE)
    ),
    Peer(
        f"torch-max-mem, from {LARGE}",
        "torch_max_mem",
        "loop",
        _torch_max_mem,
        "only downwards, by halves; made for batched computation on a GPU, and its version 0.1.6 does not recognize "
        "errors of PyTorch's CPU allocator on Linux; the call is the work itself, so nothing is put back by design",
    ),
    Peer(
        "batch-finder",
        "batch-finder",
        "loop",
        _batch_finder,
        "no cap; one forward and backward of its own model, without an optimizer, so it sees neither what a second "
        "step takes nor, on a real device, the optimizer's state; any error counts as out of memory; run in this "
        "process, which its README offers for hosts short of memory",
    ),
    Peer(
        "batchfinder callback",
        "batchfinder",
        "trainer",
        partial(_callback, tolerance=0.01),
        "starts from the simulated step, as on a GPU by default; for a simulated card that prediction is exact, which "
        "for a real one it is not",
    ),
    Peer("batchfinder callback, exact", "batchfinder", "trainer", partial(_callback, tolerance=0.0), "tolerance=0"),
    Peer(
        "batchfinder callback, predict=False",
        "batchfinder",
        "trainer",
        partial(_callback, tolerance=0.01, predict=False),
        "without the simulated step; on a CPU that is the default",
    ),
    Peer("batchfinder loop", "batchfinder", "loop", partial(_loop, tolerance=0.01), "within 1 % by design"),
    Peer("batchfinder loop, exact", "batchfinder", "loop", partial(_loop, tolerance=0.0), "tolerance=0"),
)
