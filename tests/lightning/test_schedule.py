"""What is read of a fit besides full batches, from trainers that are about to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader

from batchfinder.lightning import dry_run
from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.schedule import Schedule, read_schedule
from tests.lightning import nets


class Gradual(BaseFinetuning):
    """Freezes nothing, and would unfreeze at any epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        pass


def swa(start: float) -> Callback:
    """An average from an epoch, counted from 1, or a share of them."""
    return StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=start)


@pytest.mark.parametrize(
    ("callbacks", "expected", "later"),
    [
        ([], Schedule(), []),
        ([GradientAccumulationScheduler({0: 2, 3: 8, 4: 4})], Schedule(accumulation=8), []),
        ([BackboneFinetuning(3)], Schedule(unfreezes=range(1, 4)), [3]),
        ([BackboneFinetuning(5)], Schedule(), []),  # after the last of five epochs
        ([Gradual()], Schedule(unfreezes=range(1, 5)), [4]),
        ([swa(1)], Schedule(averages_from=0), []),  # from the first, which is tried anyway
        ([swa(3)], Schedule(averages_from=2), [2]),
        ([swa(0.8)], Schedule(averages_from=3), [3]),
        ([swa(6)], Schedule(), []),
        ([swa(3), BackboneFinetuning(2)], Schedule(unfreezes=range(1, 3), averages_from=2), [2]),
    ],
)
def test_callbacks_that_act_at_an_epoch(callbacks: list[Callback], expected: Schedule, later: list[int]) -> None:
    """Of five epochs: the most micro-batches a step, and the epochs from which there is more in memory."""
    found = read_schedule(pl.Trainer(accelerator="cpu", max_epochs=5, callbacks=callbacks, logger=False))
    assert found == expected
    assert found.later_epochs == later


@pytest.mark.parametrize(
    ("interval", "batches", "left"),
    [
        (1.0, 19, 0),
        (0.5, 19, 1),
        (0.5, 20, 0),
        (5, 19, 4),
        (19, 19, 0),
        (40, 19, 0),
        (0.01, 19, 0),
        ("00:10:00", 19, 0),
    ],
)
def test_batches_after_an_epochs_last_validation(interval: Any, batches: int, left: int) -> None:
    """As many as no validation parts from the next epoch; none without a validation."""
    assert Schedule(validation_batch_size=8, validation_interval=interval).after_last_validation(batches) == left
    assert Schedule(validation_interval=interval).after_last_validation(batches) == 0


def test_what_a_trial_takes_after_two_steps() -> None:
    """Two more until the cache stays, the smaller last batch, the next epochs; and what no validation parts."""
    assert Schedule().later_steps(32, 0, 10) == [32, 32, 32, 32, 32, 32]
    assert Schedule().later_steps(32, 5, 10) == [32, 32, 5, 32, 32, 32, 32, 5, 32, 32]
    emptied = Schedule(empties_cache=True)
    assert emptied.later_steps(32, 0, 10) == [32, 32, None, 32, 32, 32, 32]
    assert emptied.later_steps(32, 5, 10) == [32, 32, 5, None, 32, 32, 32, 32, 5]
    within = Schedule(validation_batch_size=8, validation_interval=4, empties_cache=True)
    assert within.later_steps(32, 5, 10)[-6:] == [None, 32, 5, None, 32, 32]
    assert within.later_steps(32, 5, 8) == emptied.later_steps(32, 5, 8)


def test_a_validation_that_raises_does_not_end_the_fit() -> None:
    """It is left out of further tries with a warning; the fit, which does not get that far, trains."""

    class Raises(nets.ConvNet):
        tried = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            Raises.tried += 1
            raise KeyError("labels")

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    trainer = nets.trainer(
        callbacks=[finder := BatchFinder(max_batch_size=8, cache=False)], max_steps=1, num_sanity_val_steps=0
    )
    with pytest.warns(UserWarning, match=r"tried without the fit's validation, which raised KeyError: 'labels'"):
        trainer.fit(Raises(), val_dataloaders=None)
    assert finder.batch_size == 8
    assert Raises.tried >= 1


@pytest.mark.parametrize(
    ("interval", "batches", "accumulation", "within"),
    [
        (0.5, 20, 2, False),
        (0.5, 20, 4, True),
        (5, 19, 2, True),
        (5, 19, 1, False),
        (1.0, 19, 2, False),
        (6, 19, 3, False),
    ],
)
def test_a_validation_within_a_step(interval: Any, batches: int, accumulation: int, within: bool) -> None:
    """Where it comes after a number of batches that is no multiple of the accumulation, and before an epoch's end."""
    schedule = Schedule(validation_batch_size=8, validation_interval=interval)
    assert schedule.validates_within_a_step(batches, accumulation) is within
    assert not Schedule(validation_interval=interval).validates_within_a_step(batches, accumulation)


TAKEN: list[Any] = []
"""What tries take: sizes of micro-batches, `step`, and `emptied` for the cache; no attribute, which they restore."""


class Small(nets.Transformer):
    """Notes what it is given, and validates."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        TAKEN.append(len(batch["input_ids"]))
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)
        TAKEN.append("step")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@pytest.mark.parametrize(
    ("rows", "accumulation", "interval", "order"),
    [
        # The first micro-batch's gradients are there as the validation's blocks go, and the second finds them so.
        (16, 2, 1, [4, "emptied", 4, "step", 4, 4, "step"]),
        # One step an epoch, at its end: the optimizer's state comes after the smaller batch, not after a full one.
        # The next one begins with an empty cache.
        (11, 4, 1.0, [4, 3, "step", "emptied", 4, 4, "step", "emptied"]),
    ],
)
def test_what_a_try_takes(
    rows: int, accumulation: int, interval: Any, order: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the training."""
    monkeypatch.setattr(dry_run, "give_back_cache", lambda device: TAKEN.append("emptied"))
    TAKEN.clear()
    module = Small(batch_size=4, rows=rows)
    finder = BatchFinder(max_batch_size=4, min_batch_size=4, budget="64GiB", cache=False)
    options = {"accumulate_grad_batches": accumulation, "val_check_interval": interval, "num_sanity_val_steps": 0}
    nets.trainer(callbacks=[finder], **options).fit(module)
    taken = ",".join(map(str, TAKEN))
    assert ",".join(map(str, order)) in taken, taken


VALIDATED: list[int] = []
"""Sizes of batches that were validated, in tries and in the fit."""


class Validates(nets.Transformer):
    """With a loader whose size a rule makes of the batch size."""

    rule: Callable[[int], int]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        VALIDATED.append(len(batch["input_ids"]))
        self.loss(batch)

    def val_dataloader(self) -> Any:
        return DataLoader(nets.Text(96, 16), batch_size=self.rule(self.batch_size))


def validates(rule: Callable[[int], int]) -> int | None:
    """The size of 8 that is tried and trained with, where the loaders have one of 2 before."""
    VALIDATED.clear()
    finder = BatchFinder(max_batch_size=8, min_batch_size=8, budget="64GiB", cache=False)
    module = type("Ruled", (Validates,), {"rule": staticmethod(rule)})(batch_size=2)
    nets.trainer(callbacks=[finder], max_steps=1, limit_val_batches=2).fit(module)
    return finder.batch_size


@pytest.mark.parametrize(
    ("rule", "size"),
    [(lambda size: 3 * size, 24), (lambda size: min(size, 6), 6), (lambda size: 6, 6), (lambda size: 99 * size, 96)],
)
def test_a_try_validates_with_batches_as_large_as_the_fit_does(rule: Callable[[int], int], size: int) -> None:
    """Where a hook makes them of the batch size, of that which is tried; no more than there are samples."""
    assert validates(rule) == 8
    assert len(VALIDATED) >= 2
    assert set(VALIDATED) == {size}


def test_a_hook_that_fails_at_other_sizes_ends_no_fit() -> None:
    """The validation is then tried with the size that its loader has."""

    def rule(size: int) -> int:
        assert size <= 8, "no more than 8"
        return size

    assert validates(rule) == 8
    assert set(VALIDATED) == {2, 8}


GRADIENTS: list[tuple[bool, int, int, bool]] = []
"""Of each step: whether it trains, its epoch, its number there, and whether there were gradients as it began."""


class NotesGradients(Small):
    """Three batches and a smaller one in each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trains, there = bool(self.trainer.callbacks), any(each.grad is not None for each in self.parameters())
        GRADIENTS.append((trains, self.trainer.current_epoch, batch_idx, there))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("interval", "rest", "next_epoch"), [(3, 2, 3), (1.0, 1, 1)])
def test_a_validation_leaves_a_try_no_gradients(interval: Any, rest: int, next_epoch: int) -> None:
    """As it leaves none to training: after one within an epoch the rest has none at first, and the next epoch has."""
    GRADIENTS.clear()
    finder = BatchFinder(max_batch_size=4, min_batch_size=4, budget="64GiB", cache=False)
    options: dict[str, Any] = {"val_check_interval": interval, "num_sanity_val_steps": 0, "max_epochs": 2}
    nets.trainer(callbacks=[finder], **options).fit(NotesGradients(batch_size=4, rows=14))
    there = {(trains, epoch, number): gradients for trains, epoch, number, gradients in GRADIENTS}
    within = interval == 3
    # In training: after the validation, and as the next epoch begins.
    assert there[True, *((0, 3) if within else (1, 0))] is False
    assert there[True, 1, 0] is within
    # In the try, which has the rest as an epoch of its own.
    assert there[False, rest, 0] is False
    assert there[False, next_epoch, 0] is within


def test_a_try_takes_no_more_than_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where validations fall between steps, none comes within one."""
    monkeypatch.setattr(dry_run, "give_back_cache", lambda device: TAKEN.append("emptied"))
    TAKEN.clear()
    finder = BatchFinder(max_batch_size=4, min_batch_size=4, budget="64GiB", cache=False)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}
    nets.trainer(callbacks=[finder], **options).fit(Small(batch_size=4, rows=16))
    assert "4,emptied" not in ",".join(map(str, TAKEN))
