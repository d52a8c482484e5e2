"""One rank fails while sizes are tried: each case is a function of the rank, and returns JSON values."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy

from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.compat import loader_source
from batchfinder.lightning.dataloaders import ProbeBatches
from batchfinder.lightning.ddp import ranks_of
from batchfinder.lightning.dry_run import TrialConfig
from batchfinder.lightning.stage_tuner import StageTuner
from tests.lightning.ddp_fits import fit, ranks, runs_out, sizes, trainer
from tests.lightning.ddp_nets import Injected, Unread
from tests.lightning.oom_net import Bounded, state_of

STAGES = ("forward", "backward", "optimizer")


class Searches(pl.Callback):
    """Searches again and again where the finder would once: each time another rank fails, in another stage."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.found: list[Any] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        before = state_of(trainer)
        for time_ in range(self.times):
            pl_module.stage, pl_module.rank, pl_module.above = STAGES[time_ % 3], time_ % ranks(), 1 + time_ % 2
            with closing(ranks_of(trainer)) as all_ranks:
                batches = ProbeBatches(trainer, pl_module, loader_source(trainer.fit_loop))
                options = BatchFinder(max_batch_size=3, tolerance=0.0, cache=False).options
                config = TrialConfig("fit", num_devices=ranks())
                (found,) = StageTuner(trainer, self, options, config, batches, all_ranks).tune([None])
            pl_module.stage, pl_module.rank, pl_module.above = "forward", 1, 5
            self.found.append([found.batch_size, state_of(trainer) == before])


def injected(rank: int, times: int) -> list[Any]:
    """In forward, backward and optimizer step, on each rank in turn."""
    searches = Searches(times)
    pl.seed_everything(1, verbose=False)
    trainer(searches, limit_train_batches=0).fit(Injected(runs_out))
    return searches.found


def uneven(rank: int) -> list[Any]:
    """Each rank fits another number of samples."""
    finder, error = fit(Bounded(most=7 - rank), BatchFinder(8 * ranks(), tolerance=0, cache=False))
    failed = [trial.measurement.message for trial in finder.results["fit"][None].trials if not trial.fits]
    return [finder.batch_size, str(finder.plan), sorted(sizes(finder)), failed[-1:], error]


def none_fits(rank: int) -> list[Any]:
    """Not even one sample, on one rank."""
    return [fit(Injected(runs_out, rank=ranks() - 1, above=0))[1]]


def bug(rank: int, stage: str) -> list[Any]:
    """An error of the user's own on one rank."""

    def fails() -> None:
        raise ValueError("the labels are wrong")

    return [fit(Injected(fails, stage))[1]]


def lost(rank: int, act: Any, seconds: float = 1800.0) -> list[Any]:
    """A rank that is not there any more."""
    strategy = DDPStrategy(timeout=timedelta(seconds=seconds))
    error = fit(Injected(act), strategy=strategy, accelerator="auto")[1]
    _ended().touch()
    return [error.partition(" or did not")[0], error.partition("\n")[2]]


def killed() -> None:
    """As by the kernel."""
    os.kill(os.getpid(), signal.SIGKILL)


def hung() -> None:
    """Until the others have ended."""
    while not _ended().exists():
        time.sleep(0.01)
    os._exit(0)


def _ended() -> Path:
    return Path(os.environ["BATCHFINDER_CACHE"]).parent / "ended"


def interrupted() -> None:
    """As by Ctrl-C."""
    raise KeyboardInterrupt


FAILURES: dict[str, Callable[[int], list[Any]]] = {
    "injected": lambda rank: injected(rank, 18 if ranks() == 2 else 3),
    "uneven": uneven,
    "none fits": none_fits,
    "a bug in forward": lambda rank: bug(rank, "forward"),
    "a bug in backward": lambda rank: bug(rank, "backward"),
    "a bug in optimizer": lambda rank: bug(rank, "optimizer"),
    "data": lambda rank: [fit(Unread())[1]],
    "killed": lambda rank: lost(rank, killed),
    "hung": lambda rank: lost(rank, hung, 1.0),
    "interrupted": lambda rank: lost(rank, interrupted),
}
