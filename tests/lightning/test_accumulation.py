"""Accumulation is set by the plan; every way in which a step would see another number of samples is said."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.lightning.accumulation import Accumulating, apply_accumulation
from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.oom_net import Bounded
from tests.lightning.tiny import Rows, Tiny, trainer


class Planned(Accumulating):
    """Sets a plan at the moment at which BatchFinder does."""

    def __init__(self, plan: AccumulationPlan) -> None:
        super().__init__()
        self.planned = plan

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._accumulate(trainer, self.planned)


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
        apply_accumulation(runner, plan_accumulation(100, 11, 3))
    assert str(caught[0].message) == (
        "The target batch size of 100 is not a multiple of the 3 devices, so that each optimizer step sees 11 x 3 x 3"
        " devices = 99 (1 fewer than the target of 100). Only a multiple of 3 can be met exactly."
    )


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


@pytest.mark.parametrize(
    ("rows", "batches", "last"),
    [(12, "3 micro-batches", ""), (10, "3 micro-batches", ", the last of 2"), (4, "1 micro-batch", "")],
)
def test_epoch_too_short(rows, batches, last):
    """An epoch with fewer micro-batches than a step takes is explained with the numbers, and trains."""
    module = Tiny()
    runner = trainer(callbacks=[Planned(plan_accumulation(64, 4))])
    with pytest.warns(UserWarning, match="An epoch has") as caught:
        runner.fit(module, DataLoader(Rows(rows), batch_size=4))
    messages = [str(warning.message) for warning in caught]
    assert (
        f"An epoch has {batches} of 4 samples on each device{last}, and 16 are needed for the target batch size of 64."
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


@pytest.mark.parametrize(
    ("exact", "plan"), [(False, "8 x 4 = 32 (1 more than the target of 31)"), (True, "1 x 31 = 31")], ids=str
)
def test_a_target_that_no_large_micro_batch_divides(exact: bool, plan: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is met nearly, and the line says by how much it is missed; or exactly, where that is asked for."""
    finder = BatchFinder(31, exact=exact, max_batch_size=8, tolerance=0, cache=False)
    trainer, module = nets.trainer(callbacks=[finder], max_steps=1), Bounded()
    with caplog.at_level(logging.INFO, logger="lightning_utilities.core.rank_zero"):
        trainer.fit(module)
    assert str(finder.plan) == plan
    assert f"; accumulation {plan}; " in "".join(caplog.messages)


@pytest.mark.parametrize(
    ("own", "said"), [(1, []), (3, ["BatchFinder: accumulate_grad_batches = 4 (it was 3): 2 x 4 = 8."])]
)
def test_a_number_of_the_users_is_replaced(own: int, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """It is named beside the one that is used instead; one that nobody set is not; it is back after the fit."""
    finder = BatchFinder(8, max_batch_size=2, cache=False)
    trainer = nets.trainer(callbacks=[finder], accumulate_grad_batches=own, max_steps=1)
    with caplog.at_level(logging.INFO, logger="lightning_utilities.core.rank_zero"):
        trainer.fit(Bounded())
    assert str(finder.plan) == "2 x 4 = 8"
    assert [line for line in caplog.messages if "accumulate_grad_batches" in line] == said
    assert trainer.accumulate_grad_batches == own
