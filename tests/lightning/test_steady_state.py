"""A size that needs the cache given back in its first steps fits; one that needs it in each step does not."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from batchfinder import BatchFinder
from batchfinder.lightning.dry_run import ProbeLoader
from batchfinder.training.spec import MAX_BATCHES_WITHOUT_STEP
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
    """Whatever the first steps did, a size that goes on without is the answer; above the largest such, none is."""
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


def fed(more: list[bool], least: int, micro_batches: int = 1, stepped: list[bool] | None = None) -> int:
    """How many batches a feed gives, with answers to what it asks."""
    answers, steps = iter(more), iter(stepped or [])
    feed = ProbeLoader(
        lambda: None,
        least,
        1000,
        SimpleNamespace(goes_on=lambda: next(answers), loading=nullcontext),  # type: ignore[arg-type]
        micro_batches,
        (lambda: next(steps)) if stepped else (lambda: True),
    )
    return sum(1 for _ in feed)


def test_a_feed_gives_whole_steps() -> None:
    """It asks after what it gives anyway and after each step, not after each micro-batch."""
    assert fed([False], 2) == 2
    assert fed([True, True, False], 2) == 4
    assert fed([True, True, False], 4, micro_batches=2) == 8


def test_a_feed_waits_for_the_optimizer_first() -> None:
    """Whether another step is needed is not asked before one was taken; without any it ends."""
    assert fed([False], 2, stepped=[False, False, True]) == 4
    assert fed([], 2, stepped=[False] * 100) == MAX_BATCHES_WITHOUT_STEP
