"""Fits of all ranks, for the cases that the tests of several ranks run."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.oom_net import MESSAGE

ranks = dist.get_world_size


def trainer(*callbacks: Any, strategy: Any = "ddp", **options: Any) -> pl.Trainer:
    """Of all ranks."""
    return nets.trainer(callbacks=list(callbacks), strategy=strategy, devices=ranks(), **options)


def runs_out() -> None:
    """As on a full card."""
    raise torch.OutOfMemoryError(MESSAGE)


def fit(module: Any, finder: Any = None, **options: Any) -> tuple[Any, str]:
    """Fit with a finder; what came of it, and how it ended."""
    pl.seed_everything(1, verbose=False)
    finder = finder or BatchFinder(max_batch_size=8, tolerance=0, cache=False)
    try:
        trainer(finder, **{"max_steps": 1, **options}).fit(module)
    except BaseException as error:
        return finder, f"{type(error).__name__}: {error}"
    return finder, ""


def sizes(finder: Any, stage: str = "fit") -> list[int]:
    """Those that were tried."""
    return [trial.batch_size for outcome in finder.results[stage].values() for trial in outcome.trials]
