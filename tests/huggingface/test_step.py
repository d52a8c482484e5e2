"""One step of a try is one step of training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder import tune_trainer
from batchfinder.huggingface.step import TrainerStep
from batchfinder.huggingface.tune import where_training_begins
from batchfinder.loop.result import MicroBatches
from tests.huggingface.trainers import LimitedTrainer, fixed, language_model, make_trainer, texts


def without_noise() -> dict[str, Any]:
    """Nothing depends on random numbers, and batches come in order; labels are of every length up to the text's."""
    samples = [{**each, "labels": [-100] * (n % 7) + each["input_ids"][n % 7 :]} for n, each in enumerate(texts(False))]
    return {
        "model": language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        "train_dataset": samples,
        "data_collator": lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in rows[0]},
        "train_sampling_strategy": "sequential",
        "max_steps": 1,
    }


@pytest.mark.parametrize("clip", [0.01, 0.0])
@pytest.mark.parametrize("model_kwargs", [True, False], ids=["tokens", "samples"])
def test_the_update_is_that_of_training(tmp_path: Path, clip: float, model_kwargs: bool) -> None:
    """Micro-batches, their weights, clipping and the optimizer's step: the weights agree in each bit."""

    class Own(LimitedTrainer):
        """Whose micro-batches weigh by tokens, or alike."""

        def _set_signature_columns_if_needed(self) -> None:
            self.model_accepts_loss_kwargs = model_kwargs
            super()._set_signature_columns_if_needed()

    def trainer() -> Any:
        made = make_trainer(tmp_path, without_noise, kind=Own, max_grad_norm=clip, per_device_train_batch_size=4)
        made.model_accepts_loss_kwargs = model_kwargs
        return made

    trained, stepped = trainer(), trainer()
    trained.train()

    def step(loader: Any) -> dict[str, torch.Tensor]:
        windows = [stepped.data_collator(stepped.train_dataset[start : start + 4]) for start in (0, 4, 8)]
        TrainerStep(stepped)(MicroBatches(lambda: iter(windows), len(windows)))
        return {name: value.clone() for name, value in stepped.model.state_dict().items()}

    made = where_training_begins(stepped, lambda each: each.get_train_dataloader(), (), step)
    expected = trained.model.state_dict()
    assert {name: torch.equal(value, expected[name]) for name, value in made.items()} == dict.fromkeys(expected, True)


def test_as_many_batches_are_in_memory_as_in_training(tmp_path: Path) -> None:
    """All of a step's, and the one that accelerate's loader fetches ahead, though two of them run."""
    counted: list[tuple[int, int]] = []

    class Counting(LimitedTrainer):
        """Counts the batches that are alive while one runs."""

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            shape = inputs["input_ids"].shape
            found = [item for item in gc.get_objects() if type(item) is torch.Tensor and item.dtype == torch.int64]
            counted.append((shape[0], sum(item.shape == shape for item in found)))
            return super().training_step(model, inputs, num_items_in_batch)

    def fixed_of(samples: int) -> Iterator[int]:
        return (alive for size, alive in counted if size == samples)

    trainer = make_trainer(tmp_path, fixed, kind=Counting)
    tune_trainer(trainer, max_batch_size=4, tolerance=0, cache=False)
    tried = max(fixed_of(4))
    counted.clear()
    trainer.train()
    assert tried == max(fixed_of(4)) == 7
