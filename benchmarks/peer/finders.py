"""The finders that are compared: each package's search, called as its documentation recommends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from batchfinder.versions import installed
from benchmarks.peer.work import STATE, Loop, longest_batch, module_of, on_card
from benchmarks.random_fit.draw import Fit

LARGE = 2048
"""Where a user starts who wants the largest size from a finder that only goes downwards."""


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        batch_size: what it returned; 0 for none.
        tries: how many sizes it tried, the same one twice if it did.
        before: digests of the training state; empty where they are those of a trainer that starts without a finder.
        after: the same after the search; empty where the search makes a new model for each size.
    """

    batch_size: int
    tries: int
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A way to find a batch size.

    Attributes:
        name: in tables.
        package: the distribution it comes from.
        driver: what it trains with: `loop`, `lightning` or `transformers`.
        find: searches.
        note: what it does not do, or does by design.
    """

    name: str
    package: str
    driver: str
    find: Callable[[Fit], Found]
    note: str = ""

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        return installed(self.package).get(self.package)


def _lightning(fit: Fit, mode: str) -> Found:
    from pytorch_lightning.callbacks import BatchSizeFinder

    from benchmarks.peer.trainer import start

    module = module_of(fit)
    tried: list[int] = []
    module.on_train_start = lambda: tried.append(module.batch_size)
    after = start(fit, module, [BatchSizeFinder(mode=mode)])
    return Found(module.batch_size, len(tried), after=after)


def _callback(fit: Fit, **options: Any) -> Found:
    """With the defaults but for the cache, which is empty."""
    from batchfinder import BatchFinder
    from benchmarks.peer.trainer import start

    finder = BatchFinder(cache=False, **options)
    module = module_of(fit)
    after = start(fit, module, [finder])
    (found,) = finder.results["fit"].values()
    return Found(module.batch_size, len(found.trials), after=after)


def _accelerate(fit: Fit, start: int) -> Found:
    """The whole training is in the function, with the making of the model."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        tried.append(batch_size)
        return Loop(fit).train(batch_size)

    return Found(train(), len(tried))


def _auto_find(fit: Fit) -> Found:
    from benchmarks.peer.huggingface import Starts, trainer

    starts = Starts(fit, stop=False)
    training = trainer(fit, LARGE, starts, auto_find_batch_size=True)
    training.train()
    return Found(training._train_batch_size, starts.count, after=starts.state)


def _tune_trainer(fit: Fit) -> Found:
    """The largest micro-batch; the effective batch is far above it."""
    from batchfinder import tune_trainer
    from benchmarks.peer.huggingface import Starts, trainer

    starts = Starts(fit, stop=True)
    training = trainer(fit, LARGE, starts)
    found = tune_trainer(training, cache=False)
    if fit == STATE:
        training.train()
    return Found(found.result.max_batch_size, len(found.result.trials), after=starts.state)


def _toma(fit: Fit) -> Found:
    from toma import toma

    loop, tried = Loop(fit), []
    before = loop.state()

    @toma.batch(initial_batchsize=512)
    def train(batchsize: int) -> int:
        tried.append(batchsize)
        return loop.train(batchsize)

    return Found(train(), len(tried), before, loop.state())


def _torch_max_mem(fit: Fit) -> Found:
    from torch_max_mem import maximize_memory_utilization

    loop, tried = Loop(fit), []
    before = loop.state()

    @maximize_memory_utilization()
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        return loop.train(batch_size)

    return Found(train(batch_size=LARGE), len(tried), before, loop.state())


class _TokenNet(nn.Module):
    """batch-finder makes integers for an argument of this name, as many as the vocabulary has."""

    def __init__(self, fit: Fit, tried: list[int]) -> None:
        super().__init__()
        self.module = module_of(fit).cuda()
        self.config = SimpleNamespace(vocab_size=fit.vocabulary)
        self.tried = tried

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.tried.append(len(input_ids))
        return self.module.loss({"input_ids": input_ids})


class _FloatNet(_TokenNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tried.append(len(x))
        return self.module.loss(x)


def _batch_finder(fit: Fit) -> Found:
    from batch_finder import find_max_minibatch

    loop: Loop = Loop(fit)
    before, tried = loop.state(), []
    sample = longest_batch(loop.module, 1)
    tokens = isinstance(sample, dict)
    found = find_max_minibatch(
        lambda: (_TokenNet if tokens else _FloatNet)(fit, tried),
        input_shapes=(-1, *(sample["input_ids"] if tokens else sample).shape[1:]),
        device=torch.device("cuda"),
        use_subprocess=False,
        delay=0.0,
    )
    return Found(0 if found is None else int(found[0]), len(tried), before, loop.state())


def _loop(fit: Fit, **options: Any) -> Found:
    """With the defaults but for the cache, which is empty; on batches of the longest sample."""
    from batchfinder import tune_batch_size

    loop = Loop(fit)
    before = loop.state()
    found = tune_batch_size(
        loop.step,
        lambda batch_size, seq_len: on_card(longest_batch(loop.module, batch_size)),
        [loop.module, loop.optimizer],
        cache=False,
        **options,
    )
    return Found(found.batch_size, len(found.result.trials), before, loop.state())


_RUNS_TRAINING = "the call is the training itself"

PEERS = (
    Peer(
        "Lightning power",
        "pytorch-lightning",
        "lightning",
        partial(_lightning, mode="power"),
        "powers of two by design; three steps per size",
    ),
    Peer(
        "Lightning binsearch",
        "pytorch-lightning",
        "lightning",
        partial(_lightning, mode="binsearch"),
        "takes 5 % off what it found by design; three steps per size",
    ),
    *(
        Peer(
            f"accelerate, from {start}",
            "accelerate",
            "loop",
            partial(_accelerate, start=start),
            f"only downwards, by a tenth; {_RUNS_TRAINING}, begun anew at each size",
        )
        for start in (128, LARGE)
    ),
    Peer(
        f"auto_find_batch_size, from {LARGE}",
        "transformers",
        "transformers",
        _auto_find,
        f"only downwards, by a tenth; {_RUNS_TRAINING}, begun anew at each size with the weights of the last",
    ),
    Peer("toma, from 512", "toma", "loop", _toma, f"only downwards, by halves; {_RUNS_TRAINING}"),
    Peer(
        f"torch-max-mem, from {LARGE}",
        "torch_max_mem",
        "loop",
        _torch_max_mem,
        f"only downwards, by halves; made for batched computation; {_RUNS_TRAINING}",
    ),
    Peer(
        "batch-finder",
        "batch-finder",
        "loop",
        _batch_finder,
        "one forward and backward of its own model on the longest samples, without an optimizer, so it sees neither "
        "what a second step takes nor the optimizer's state; run in this process, which its README offers, and without "
        "its pauses",
    ),
    Peer("batchfinder callback", "batchfinder", "lightning", _callback, "within 1 % by design"),
    Peer(
        "batchfinder callback, predict=False",
        "batchfinder",
        "lightning",
        partial(_callback, predict=False),
        "without the prediction that the callback starts from on a GPU",
    ),
    Peer("batchfinder loop", "batchfinder", "loop", _loop, "within 1 % by design; on batches of the longest samples"),
    Peer(
        "batchfinder loop, 5 % headroom",
        "batchfinder",
        "loop",
        partial(_loop, headroom="5%"),
        "as in the example of its documentation",
    ),
    Peer(
        "batchfinder tune_trainer",
        "batchfinder",
        "transformers",
        _tune_trainer,
        "the largest micro-batch that it found",
    ),
)
