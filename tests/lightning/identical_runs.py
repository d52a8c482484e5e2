"""One run that finds its sizes and one that is started with them, for tests that compare the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch.distributed.tensor import DTensor

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets

SIZE = 8


@dataclass
class Run:
    """What a run leaves.

    Attributes:
        module: trained.
        trainer: stopped.
        callbacks: the user's own.
        finder: None in the run that was started with the sizes.
    """

    module: Any
    trainer: pl.Trainer
    callbacks: list[Any]
    finder: BatchFinder | None


def two_runs(
    make: Callable[[int], Any],
    *,
    callbacks: Callable[[], Sequence[Any]] = list,
    target: int | None = None,
    before: bool = False,
    feed: Callable[[int], dict[str, Any]] = lambda size: {},
    options: Callable[[str], dict[str, Any]] = lambda name: {},
    **common: Any,
) -> tuple[Run, Run]:
    """Train twice from the same seed: from batch size 2 with the finder, and from batch size 8 without it.

    Args:
        make: a module for a batch size.
        callbacks: the user's own, made for each run.
        target: the finder's; the other run accumulates to it by the trainer.
        before: whether the user's callbacks come before the finder.
        feed: what is passed to fit for a batch size besides the module.
        options: what is passed to each run's trainer besides `common`; called with `found` or `direct`.
    """
    runs = []
    for name, size in (("found", 2), ("direct", SIZE)):
        pl.seed_everything(1, verbose=False)
        module, own = make(size), list(callbacks())
        finder = BatchFinder(target, max_batch_size=SIZE, cache=False) if name == "found" else None
        finders = [] if finder is None else [finder]
        accumulated = {"accumulate_grad_batches": target // SIZE} if target and finder is None else {}
        trainer = nets.trainer(
            callbacks=own + finders if before else finders + own,
            **{"max_epochs": 2, **common, **accumulated, **options(name)},
        )
        trainer.fit(module, **feed(size))
        runs.append(Run(module, trainer, own, finder))
    return runs[0], runs[1]


def assert_identical(found: Run, direct: Run) -> None:
    """Losses, tensors and progress are the same, bit for bit, and the size was found."""
    assert found.finder is not None
    assert found.finder.batch_size == SIZE
    assert found.module.losses == direct.module.losses
    assert len(found.module.losses) > 0
    assert same(found.module, direct.module)
    assert found.trainer.global_step == direct.trainer.global_step > 0
    assert found.trainer.current_epoch == direct.trainer.current_epoch


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules hold the same bits, buffers that are not saved included; of shards this process's own."""
    tensors = [
        {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in named}
        for module in (one, other)
        for named in [[*module.named_parameters(), *module.named_buffers()]]
    ]
    return tensors[0].keys() == tensors[1].keys() and all(torch.equal(tensors[0][n], tensors[1][n]) for n in tensors[0])
