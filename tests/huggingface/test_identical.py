"""Training after sizes were tried is bit for bit the training whose sizes were set by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from batchfinder import tune_trainer
from tests.huggingface import trainers
from tests.huggingface.trainers import Loud, Stream, Weighing, fixed, language_model, texts
from tests.snapshot.state_digest import Digester, differences

# A target of 24; 5 fit, so it is made of 4 x 6.
SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}

Options = Callable[[], dict[str, Any]]
CASES: dict[str, Options] = {
    "lengths that vary": dict,
    "label smoothing, grouped by length": lambda: {
        "label_smoothing_factor": 0.1,
        "train_sampling_strategy": "group_by_length",
    },
    "bf16 and checkpointing": lambda: {"bf16": True, "activation_checkpointing": True, **fixed()},
    "a loss of one's own": lambda: {"kind": Weighing, "neftune_noise_alpha": 5.0},
    "a stream": lambda: {"train_dataset": Stream(texts())},
    "made by a function": lambda: {"model_init": lambda: language_model()},
    "an optimizer of one's own": lambda: _with_optimizer(),
}


def _with_optimizer() -> dict[str, Any]:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return {"model": model, "optimizers": (optimizer, scheduler), "max_grad_norm": 0.0}


def train(trainer: Trainer) -> dict[str, Any]:
    """Train; everything that came of it, but for the time it took."""
    trainer.train()
    logs = [
        {name: value for name, value in each.items() if "_per_second" not in name} for each in trainer.state.log_history
    ]
    return {
        "logs": [{name: value for name, value in each.items() if name != "train_runtime"} for each in logs],
        "weights": {name: value.numpy().tobytes() for name, value in trainer.model.state_dict().items()},
        "optimizer": repr(trainer.optimizer.state_dict()),
        "scheduler": repr(trainer.lr_scheduler.state_dict()["last_epoch"]),
        "steps": trainer.state.global_step,
        "random": (random.random(), torch.rand(1).item()),
    }


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_a_trainer_with_these_sizes(tmp_path: Path, case: str) -> None:
    """Losses, gradient norms, weights, optimizer, schedule and random numbers agree in each bit."""
    by_hand = trainers.make_trainer(tmp_path, CASES[case], **SIZES)
    expected = train(by_hand)
    assert expected["steps"] == 3
    tuned = trainers.make_trainer(tmp_path, CASES[case])
    found = tune_trainer(tuned, tolerance=0)
    assert (found.result.max_batch_size, found.batch_size, found.accumulation) == (5, 4, 6)
    assert train(tuned) == expected


@pytest.mark.parametrize("case", CASES)
def test_every_object_but_the_sizes_is_as_it_was(tmp_path: Path, case: str) -> None:
    """Each object within the trainer's reach holds what it held, and the process: random numbers, settings, hooks."""
    trainer = trainers.make_trainer(tmp_path, CASES[case], callbacks=[Loud()], **SIZES)
    digest = Digester(keep=True)
    before = digest(trainer=trainer)
    tune_trainer(trainer, tolerance=0, cache=False)
    assert differences(digest(trainer=trainer), before) == []


def test_a_second_training_of_the_same_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Sizes may be found between two trainings, with gradients and an optimizer there."""

    def twice(tune: bool) -> dict[str, Any]:
        trainer = trainers.make_trainer(tmp_path, fixed, **SIZES)
        trainer.train()
        if tune:
            tune_trainer(trainer, cache=False)
        return train(trainer)

    assert twice(True) == twice(False)


def test_callbacks_sit_out_unless_they_are_named(tmp_path: Path) -> None:
    """Those of the trainer hear nothing of a search; one that is named hears of each step."""
    trainer = trainers.make_trainer(tmp_path, fixed, callbacks=[Loud()], **SIZES)
    Loud.heard.clear()
    tune_trainer(trainer, cache=False)
    assert Loud.heard == []
    tune_trainer(trainer, cache=False, probe_callbacks=[Loud])
    assert Loud.heard[0] == "train begins"
    assert Loud.heard.count("step ends") >= 4
