"""A module built in both ways, and a trainer as it is where the finder would search, for tests of predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

from batchfinder.lightning.dataloaders import ProbeBatches
from tests.lightning import nets


class Here(nets.Transformer):
    """Makes batches itself, as a workload does."""

    def make_batch(self, batch_size: int, seq_len: int | None) -> Any:
        ids = torch.zeros((batch_size, seq_len or self.seq_len), dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}


class AtStart(pl.Callback):
    """Calls a function where the finder would search, and ends the fit."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self.answer: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        batches = ProbeBatches(trainer, pl_module, trainer.fit_loop._data_source)
        self.answer = self.function(trainer, self, batches)
        trainer.should_stop = True


def at_start(module: Any, function: Callable[..., object], **options: Any) -> Any:
    """What a function returns that is called with the trainer, the callback and the batches as a fit starts."""
    callback = AtStart(function)
    nets.trainer(callbacks=[callback], max_steps=1, num_sanity_val_steps=0, **options).fit(module)
    return callback.answer
