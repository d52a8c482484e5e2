"""The same work in transformers' Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peer.work import STATE, module_of, state_digests, steps_of
from benchmarks.random_fit.draw import Fit
from benchmarks.random_fit.parts import Module, padded


class WithLoss(nn.Module):
    """The case's module as the Trainer calls a model: with the batch's items by name, for the loss."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        return {"loss": self.module.loss(batch.get("images", batch))}


class Starts(TrainerCallback):
    """Counts the starts of a training, and keeps digests of the state at the last one, where it may end."""

    def __init__(self, fit: Fit, stop: bool) -> None:
        self.fit, self.stop = fit, stop
        self.count = 0
        self.state: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.count += 1
        self.state = state_digests(others["model"], others["optimizer"].optimizer) if self.fit == STATE else {}
        control.should_training_stop = self.stop


def trainer(fit: Fit, batch_size: int, starts: Starts | None = None, **options: Any) -> Trainer:
    """A Trainer of the case's module; nothing is logged or saved."""
    module = module_of(fit)
    samples = module.train_dataloader().dataset
    arguments = TrainingArguments(
        tempfile.gettempdir(),  # nothing is written
        per_device_train_batch_size=batch_size,
        max_steps=steps_of(fit, batch_size),
        optim="adamw_torch",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )
    return Trainer(
        WithLoss(module),
        arguments,
        train_dataset=samples,
        data_collator=padded if samples.tokens else lambda images: {"images": default_collate(images)},
        callbacks=[starts] if starts else None,
    )


def train(fit: Fit, batch_size: int) -> None:
    """Train without a finder."""
    trainer(fit, batch_size).train()
