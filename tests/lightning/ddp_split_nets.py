"""Nets for split batches on several ranks: they leave parameters out, meet in their steps, or fail on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.lightning.ddp_fits import ranks
from tests.lightning.varied_lengths import MESSAGE, Reader

STAGES = ("forward", "backward")


class Branching(Reader):
    """A layer that only some micro-batches of some ranks use, one that none does, and a buffer that forwards change."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extra = torch.nn.Linear(6, 1, dtype=torch.float64)
        self.never = torch.nn.Linear(6, 1, dtype=torch.float64)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        rare = (batch["input_ids"] == 7) & (batch["labels"] != -100)
        if self.trainer.global_rank == 0 and rare.any():
            loss = loss + self.extra(self.embed(batch["input_ids"]))[rare].sum() / (batch["labels"] != -100).sum()
        return loss


class Sharing(Reader):
    """Logs a mean over the ranks, and fails on one rank in one stage of each batch, once."""

    def __init__(self, fails: bool = False, **options: Any) -> None:
        super().__init__(**{"dropout": 0.2, "ignored": False, **options})
        self.fails, self.failed = fails, set[int]()
        self.norm = torch.nn.BatchNorm1d(1, dtype=torch.float64)

    def reach(self, stage: str) -> None:
        step = self.trainer.fit_loop.epoch_loop.total_batch_idx
        due = STAGES[step // 2 % 2] == stage and step % ranks() == self.global_rank
        if self.fails and due and step not in self.failed:
            self.failed.add(step)
            raise torch.OutOfMemoryError(MESSAGE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.norm(loss.detach().expand(2, 1))  # a buffer that DDP takes from rank 0 for each batch
        self.log("mean", loss, sync_dist=True, on_step=True, on_epoch=True)
        if len(self.sizes) % 2:
            self.reach("forward")
        loss.register_hook(lambda gradient: self.reach("backward"))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Tight(Reader):
    """From a step on fewer tokens fit on the last rank."""

    def __init__(self, tokens: int, **options: Any) -> None:
        super().__init__(**{"ignored": False, **options})
        self.tokens = tokens

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        tight = self.trainer.global_step >= 2 and self.global_rank == ranks() - 1
        if tight and batch["input_ids"].numel() > self.tokens:
            raise torch.OutOfMemoryError(MESSAGE)
        return loss


class Buggy(Reader):
    """Fails on one rank, in a way that is not about memory."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == ranks() - 1:
            self.act()
        return super().training_step(batch, batch_idx)


class Wide(Reader):
    """Some 3 MiB for each sample of 128 tokens."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32, rows=256, batch_size=32, longest=128)
        self.wide, self.narrow = torch.nn.Linear(6, 2048), torch.nn.Linear(2048, 1)

    def loss(self, batch: Any) -> Tensor:
        losses = self.narrow(torch.tanh(self.wide(self.embed(batch["input_ids"])))).squeeze(2)
        counts = batch["labels"] != -100
        return (losses * counts).square().sum() / counts.sum()
