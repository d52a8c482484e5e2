"""Text of mixed lengths, padded on the right, and a small module in double precision that is trained on it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from batchfinder.lightning.ddp import gradient_sync, ranks_of
from batchfinder.lightning.micro_batching.closure import MicroBatchClosure
from batchfinder.lightning.micro_batching.micro_batch import LengthTable, micro_batches
from batchfinder.lightning.micro_batching.recovery import Recovery

TOKENS = 11
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."


class Varied(Dataset[Any]):
    """Sentences of `shortest` to `longest` random tokens; one in five has no label that counts."""

    def __init__(self, rows: int, shortest: int = 3, longest: int = 16, ignored: bool = True) -> None:
        draw = random.Random(4)
        self.rows = [
            [draw.randrange(1, TOKENS) for _ in range(draw.randint(shortest, longest))] for _ in range(rows - 1)
        ]
        self.rows.insert(rows // 2, [1] * longest)
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[list[int], bool]:
        return self.rows[index], self.ignored and index % 5 == 3


def collate(samples: list[tuple[list[int], bool]]) -> dict[str, Tensor]:
    """Pad to the longest; ignored labels are -100."""
    longest = max(len(row) for row, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for index, (row, ignored) in enumerate(samples):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
        if not ignored:
            labels[index, : len(row)] = ids[index, : len(row)].roll(1)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Reader(pl.LightningModule):
    """Attention over what the mask leaves, and a loss that is a mean over tokens, over samples, or a sum."""

    def __init__(
        self,
        reduction: str = "tokens",
        dropout: float = 0.0,
        optimizer: Any = torch.optim.SGD,
        rows: int = 24,
        batch_size: int = 8,
        dtype: torch.dtype = torch.float64,
        longest: int = 16,
        ignored: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ignored = ignored
        self.reduction, self.make_optimizer, self.rows, self.batch_size = reduction, optimizer, rows, batch_size
        self.longest = longest
        self.embed = nn.Embedding(TOKENS, 6, dtype=dtype)
        self.query, self.key, self.head = (nn.Linear(6, out, dtype=dtype) for out in (6, 6, TOKENS))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(1))
        self.sizes: list[int] = []
        self.most: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch["input_ids"]))
        self.seen += len(batch["input_ids"])
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.most is not None and len(batch["input_ids"]) * batch["input_ids"].size(1) > self.most:
            raise torch.OutOfMemoryError(MESSAGE)
        return loss

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["input_ids"])
        scores = self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(6)
        scores = scores.masked_fill(batch["attention_mask"][:, None] == 0, float("-inf"))
        logits = self.head(self.dropout(scores.softmax(-1) @ x))
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        counts = batch["labels"] != -100
        if self.reduction == "tokens":
            return losses.sum() / counts.sum()
        if self.reduction == "samples":
            return (losses.sum(1) / counts.sum(1).clamp(min=1)).mean()
        return losses.sum() / 100

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(
            Varied(self.rows, longest=self.longest, ignored=self.ignored),
            self.batch_size,
            shuffle=True,
            collate_fn=collate,
        )


class Given(pl.Callback):
    """Splits batches as the finder does, by sizes that are given instead of found."""

    def __init__(
        self, sizes: dict[int | None, int], weight: Any = "tokens", in_order: bool = False, recover: bool = False
    ) -> None:
        self.table = LengthTable(sizes)
        self.weight, self.in_order, self.recover = weight, in_order, recover

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.ranks = ranks_of(trainer)
        recovery = Recovery(self.table, {}, self.ranks) if self.recover else None

        def split_batch(batch: Any) -> Any:
            return micro_batches(batch, self.table, self.weight, self.in_order)

        self.step = MicroBatchClosure(trainer, split_batch, gradient_sync(trainer.strategy, self.recover), recovery)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.ranks.close()
        self.step.undo()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.ranks.close()
