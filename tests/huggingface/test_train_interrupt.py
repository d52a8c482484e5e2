"""Standing where training begins: what has been prepared, and what is undone."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder import tune_trainer
from batchfinder.errors import InvalidValue
from batchfinder.huggingface.step import own_loader
from batchfinder.huggingface.tune import where_training_begins
from tests.huggingface.trainers import SEEN, LimitedTrainer, fixed, language_model, make_trainer


def test_everything_is_prepared_and_no_step_has_been_taken(tmp_path: Path) -> None:
    """The optimizer and the schedule are there, the model casts as it will, and nothing is evaluated first."""
    trainer = make_trainer(
        tmp_path,
        fixed,
        bf16=True,
        eval_on_start=True,
        eval_strategy="steps",
        eval_dataset=fixed()["train_dataset"],
    )
    evaluated: list[str] = []
    trainer.evaluation_loop = lambda *args, **rest: evaluated.append("evaluated")

    def look(loader: Any) -> tuple[Any, ...]:
        outputs = trainer.model_wrapped(**next(iter(loader)))
        weights = trainer.model.classifier.weight.dtype
        assert trainer.args.per_device_train_batch_size == trainer._train_batch_size == 8
        return type(trainer.optimizer.optimizer), trainer.lr_scheduler is None, trainer.is_in_train, outputs, weights

    optimizer, no_schedule, training, outputs, weights = where_training_begins(trainer, own_loader, (), look)
    assert (optimizer, no_schedule, training) == (torch.optim.AdamW, False, True)
    assert outputs.loss.isfinite()
    assert (weights, evaluated) == (torch.float32, [])
    assert (trainer.optimizer, trainer.lr_scheduler, trainer.is_in_train) == (None, None, False)
    assert trainer.args.eval_on_start


def test_a_training_is_announced_once(tmp_path: Path) -> None:
    """Whoever reads the log at level INFO sees nothing of a training that does not take place."""
    log = logging.getLogger("transformers.trainer")
    level = log.level
    read: list[str] = []

    class Reading(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            read.append(record.getMessage())

    trainer = make_trainer(tmp_path, max_steps=1)
    reading = Reading()
    log.addHandler(reading)
    log.setLevel(logging.INFO)
    try:
        tune_trainer(trainer, cache=False)
        assert read == []
        assert log.level == logging.INFO
        trainer.train()
    finally:
        log.removeHandler(reading)
        log.setLevel(level)
    assert read.count("***** Running training *****") == 1


def test_a_training_that_asks_for_no_batch_is_refused_before_it_changes_anything(tmp_path: Path) -> None:
    """One that steps on its own, and one that ends at once."""

    class Alone(LimitedTrainer):
        def train(self, *args: Any, **rest: Any) -> None:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            self.model(**self.data_collator(self.train_dataset[:2])).loss.backward()
            optimizer.step()

    class Idle(LimitedTrainer):
        def train(self, *args: Any, **rest: Any) -> None:
            """Nothing."""

    expected = (
        "a trainer whose train() iterates over get_train_dataloader(); for a loop of its own there is tune_batch_size"
    )
    for kind, does in ((Alone, "SGD steps"), (Idle, "Idle ends")):
        trainer = make_trainer(tmp_path, kind=kind, model=language_model())
        before = [value.clone() for value in trainer.model.parameters()]
        said = f"trainer: invalid value '{does} without a batch'; expected {expected}."
        with pytest.raises(InvalidValue, match=f"^{re.escape(said)}$"):
            tune_trainer(trainer)
        assert all(map(torch.equal, trainer.model.parameters(), before))


def test_an_interrupt_puts_everything_back(tmp_path: Path) -> None:
    """Ctrl-C in a try arrives, and the trainer is as it was."""

    class Interrupted(LimitedTrainer):
        def training_step(self, *args: Any) -> Any:
            super().training_step(*args)
            raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, kind=Interrupted)
    before = [value.clone() for value in trainer.model.parameters()]
    SEEN.clear()
    with pytest.raises(KeyboardInterrupt):
        tune_trainer(trainer)
    assert SEEN
    assert all(map(torch.equal, trainer.model.parameters(), before))
    assert all(value.grad is None for value in trainer.model.parameters())
    assert "get_train_dataloader" not in vars(trainer)
