"""Accumulation is set by the plan, and every way in which a step would see another number of samples is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.errors import InvalidValue
from batchfinder.lightning.accumulation import LastWindow, apply_accumulation
from tests.lightning.tiny import Rows, Tiny, trainer


class Planned(pl.Callback):
    """Sets a plan at the moment at which BatchFinder does."""

    def __init__(self, plan: AccumulationPlan) -> None:
        self.plan = plan
        self.steps = 0
        self.last_window = LastWindow(plan)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.lines = apply_accumulation(trainer, self.plan)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.last_window.on_train_start(trainer, pl_module)


class Manual(Tiny):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()


def attached(module: Any = None, world_size: int = 1, monkeypatch: Any = None, **settings: Any) -> pl.Trainer:
    """A trainer with a module."""
    runner = trainer(**settings)
    runner.strategy.connect(module or Tiny())
    if monkeypatch:
        monkeypatch.setattr(type(runner), "world_size", world_size)
    return runner


def test_set_and_undone():
    """A plan that is exact is set, stated, and can be taken back; without a warning."""
    runner = attached()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied = apply_accumulation(runner, plan_accumulation(64, 20))
    assert runner.accumulate_grad_batches == 4
    assert applied == ["accumulate_grad_batches = 4: 16 x 4 = 64"]
    applied.undo()
    assert runner.accumulate_grad_batches == 1


def test_replaces_the_users_own():
    """A number that the user gave the trainer is replaced, and the line says so."""
    runner = attached(accumulate_grad_batches=3)
    assert apply_accumulation(runner, plan_accumulation(64, 20)) == [
        "accumulate_grad_batches = 4 (it was 3): 16 x 4 = 64"
    ]


def test_steps_per_epoch():
    """Lightning then steps once per target's worth of samples."""
    module = Tiny()
    runner = trainer(callbacks=[Planned(plan_accumulation(8, 2))])
    runner.fit(module, DataLoader(Rows(32), batch_size=2))
    assert (len(module.seen), runner.global_step) == (16, 4)


def test_deviation_is_stated(monkeypatch):
    """A target that the devices do not divide is warned about with the numbers."""
    runner = attached(world_size=3, monkeypatch=monkeypatch)
    with pytest.warns(UserWarning, match="not a multiple") as caught:
        apply_accumulation(runner, plan_accumulation(100, 30, 3))
    assert str(caught[0].message) == (
        "The target batch size of 100 is not a multiple of the 3 devices, so that each optimizer step sees 11 x 3 x 3"
        " devices = 99 (1 fewer than the target of 100). Choose a multiple of 3 to have it exactly."
    )


def test_plan_for_other_devices():
    """A plan for another number of devices than there are is refused."""
    with pytest.raises(InvalidValue) as caught:
        apply_accumulation(attached(), plan_accumulation(64, 8, 2))
    assert str(caught.value) == "plan.num_devices: 2 will not do; expected the trainer's 1."


def test_scheduler_refused():
    """A GradientAccumulationScheduler decides the same thing, and is refused with what to do."""
    runner = attached(callbacks=[GradientAccumulationScheduler({0: 2})])
    with pytest.raises(MisconfigurationException) as caught:
        apply_accumulation(runner, plan_accumulation(64, 64))
    assert str(caught.value) == (
        "GradientAccumulationScheduler and BatchFinder with a target batch size of 64 both decide how many"
        " micro-batches are accumulated. Remove the scheduler, or leave out target_batch_size:"
        " BatchFinder then sets the batch size alone."
    )


def test_manual_optimization():
    """Manual optimization accumulates by itself: refused where it takes more than one micro-batch, else left alone."""
    runner = attached(Manual())
    with pytest.raises(MisconfigurationException) as caught:
        apply_accumulation(runner, plan_accumulation(64, 20))
    assert str(caught.value) == (
        "A target batch size of 64 takes 16 x 4 = 64, and Manual optimizes manually, where Lightning accumulates"
        " nothing. Leave out target_batch_size, and in training_step scale the loss by 1/4 and step the optimizer at"
        " every 4th batch."
    )
    assert apply_accumulation(runner, plan_accumulation(64, 64)) == []
    assert runner.accumulate_grad_batches == 1


def test_strategy_that_accumulates(monkeypatch):
    """A strategy that accumulates by its own configuration is refused with the number to write there."""
    runner = attached()
    monkeypatch.setattr(type(runner.strategy), "handles_gradient_accumulation", True)
    with pytest.raises(MisconfigurationException) as caught:
        apply_accumulation(runner, plan_accumulation(64, 20))
    assert str(caught.value) == (
        "A target batch size of 64 takes 16 x 4 = 64, and SingleDeviceStrategy accumulates by its own configuration,"
        " which is read before BatchFinder runs. Set its gradient_accumulation_steps to 4, and leave out"
        " target_batch_size."
    )


@pytest.mark.parametrize(("rows", "batches"), [(12, "3 micro-batches"), (4, "1 micro-batch")])
def test_epoch_too_short(rows, batches):
    """An epoch with fewer micro-batches than a step takes is explained with the numbers, and trains."""
    module = Tiny()
    runner = trainer(callbacks=[Planned(plan_accumulation(64, 4))])
    with pytest.warns(UserWarning, match="An epoch has") as caught:
        runner.fit(module, DataLoader(Rows(rows), batch_size=4))
    messages = [str(warning.message) for warning in caught]
    assert (
        f"An epoch has {batches} of 4 samples on each device, and 16 are needed for the target batch size of 64."
        f" Lightning steps at the end of each epoch, so that every optimizer step sees at most {rows} samples. Their"
        f" gradients are averaged correctly, but for steps of one size choose a target_batch_size of at most {rows}."
    ) in messages
    assert runner.global_step == 1


def test_epoch_just_long_enough():
    """An epoch of exactly one step's micro-batches is not warned about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(callbacks=[Planned(plan_accumulation(16, 4))]).fit(Tiny(), DataLoader(Rows(16), batch_size=4))
    assert not [warning for warning in caught if "An epoch has" in str(warning.message)]
