"""A size that needs the cache given back does not fit, whether in its first steps alone or in each."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from batchfinder import BatchFinder
from tests.lightning.tiny import Rows
from tests.settling_card import ANSWER, SettlingCard, step


class Settles(pl.LightningModule):
    """Takes the card's memory in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.batch_size = 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        step(len(batch))
        return (self.layer(batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(400), batch_size=self.batch_size)


@pytest.mark.parametrize("cap", [80, 81, 86, 90, 200])
def test_the_callback(cap: int) -> None:
    """The largest that never needs it is the answer."""
    finder = BatchFinder(max_batch_size=cap, tolerance=0.0, cache=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[finder],
    )
    with patch("batchfinder.lightning.stage_tuner.memory_of", lambda device, budget: SettlingCard()):
        trainer.fit(Settles())
    assert finder.batch_size == min(cap, ANSWER)
