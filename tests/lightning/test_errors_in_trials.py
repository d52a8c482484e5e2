"""An out-of-memory, an interrupt or a bug anywhere in a try leaves everything as it was."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.distributed.agreement import Ranks
from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.compat import loader_source
from batchfinder.lightning.dataloaders import ProbeBatches
from batchfinder.lightning.dry_run import DryRun, TrialConfig
from batchfinder.lightning.stage_tuner import StageTuner
from batchfinder.measure import trial
from batchfinder.measure.tuner import TuningResult
from tests.lightning import nets
from tests.lightning.oom_net import MESSAGE, Bounded, state_of

pytestmark = pytest.mark.slow

STAGES = ("forward", "backward", "optimizer")
ACTIVE: list[FailingOperator] = []  # not an attribute of anything that is put back


class FailingOperator(TorchDispatchMode):
    """Counts operators over all tries, and raises in the Nth."""

    def __init__(self, at: int | None, error: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.error, self.count, self.stage, self.failed_in = at, error, 0, "forward", ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            self.failed_in = self.stage
            assert self.error is not None
            raise self.error
        return func(*args, **(kwargs or {}))


class Searches(pl.Callback):
    """Runs `check` where the finder would search, with a function that searches under a mode."""

    def __init__(self, check: Callable[[pl.Trainer, Callable[[FailingOperator], TuningResult]], None]) -> None:
        self.check = check

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def search(mode: FailingOperator) -> TuningResult:
            batches = ProbeBatches(trainer, pl_module, loader_source(trainer.fit_loop))
            options = BatchFinder(max_batch_size=3, tolerance=0.0, cache=False).options
            tuner = StageTuner(trainer, self, options, TrialConfig("fit", accumulation=2), batches, Ranks())
            ACTIVE.append(mode)
            try:
                return tuner.tune([None])[0]
            finally:
                ACTIVE.clear()

        self.check(trainer, search)


class Staged(Bounded):
    """Tells the mode which stage runs."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        ACTIVE[0].stage = "forward"

    def on_before_backward(self, loss: torch.Tensor) -> None:
        ACTIVE[0].stage = "backward"

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        ACTIVE[0].stage = "optimizer"


@pytest.fixture(autouse=True)
def under_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries run under the mode; a full garbage collection for each of 100 searches would take minutes."""
    fit = DryRun.fit

    def under(self: DryRun, *args: Any) -> None:
        with ACTIVE[0] if ACTIVE else contextlib.nullcontext():
            fit(self, *args)

    monkeypatch.setattr(DryRun, "fit", under)
    monkeypatch.setattr(trial, "clear", lambda device: None)


def run(check: Callable[[pl.Trainer, Callable[[FailingOperator], TuningResult]], None]) -> None:
    """Call `check` at the start of a fit whose net fits two samples."""
    pl.seed_everything(1)
    nets.trainer(callbacks=[Searches(check)], limit_train_batches=0).fit(Staged(most=2))


def test_40_injections_leave_the_state_and_the_answer() -> None:
    """Out of memory in the Nth operator of a search, in any stage: the answer is right, the state bit-identical."""
    stages: Counter[str] = Counter()

    def check(trainer: pl.Trainer, search: Callable[[FailingOperator], TuningResult]) -> None:
        before = state_of(trainer)
        whole = FailingOperator(None)
        assert search(whole).batch_size == 2
        assert state_of(trainer) == before
        draw = random.Random(2)
        for _ in range(40):
            mode = FailingOperator(draw.randint(1, whole.count), torch.OutOfMemoryError(MESSAGE))
            assert search(mode).batch_size == 2
            assert state_of(trainer) == before
            stages[mode.failed_in] += 1

    run(check)
    assert sum(stages.values()) == 40
    assert all(stages[stage] > 3 for stage in STAGES), stages


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("the labels are wrong")], ids=["interrupt", "bug"])
def test_an_interrupt_and_a_bug_propagate_unchanged_after_restoring(error: BaseException) -> None:
    """The very exception arrives, with the user's own frames in its traceback, and everything is back."""

    def check(trainer: pl.Trainer, search: Callable[[FailingOperator], TuningResult]) -> None:
        before = state_of(trainer)
        whole = FailingOperator(None)
        search(whole)
        for at in (1, whole.count // 3, whole.count // 2, whole.count - 1):
            with pytest.raises(type(error)) as caught:
                search(FailingOperator(at, error))
            assert caught.value is error
            assert state_of(trainer) == before

    run(check)


def test_a_bug_in_the_users_step_keeps_its_traceback() -> None:
    """It is raised through fit, once, and nothing says it was about memory."""

    class Buggy(nets.ConvNet):
        def loss(self, batch: Any) -> torch.Tensor:
            if len(batch[0]) > 1:
                raise RuntimeError("memory of an elephant")
            return super().loss(batch)

    with pytest.raises(RuntimeError, match=r"^memory of an elephant$") as caught:
        nets.trainer(callbacks=[BatchFinder(cache=False)]).fit(Buggy())
    assert caught.traceback[-1].name == "loss"
