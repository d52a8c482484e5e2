"""Small modules that train for real: a transformer on generated text, and a convolutional net."""

from __future__ import annotations

import csv
import random
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS = ("the", "a", "cat", "dog", "bird", "sees", "likes", "finds", "small", "red", "old", "house", "then", "there")


class Text(Dataset[Any]):
    """Sentences made of random words, as tokens, all of one length."""

    def __init__(self, rows: int, seq_len: int) -> None:
        draw = random.Random(0)
        self.rows = [[draw.randrange(len(WORDS)) for _ in range(seq_len + 1)] for _ in range(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.tensor(self.rows[index])
        return {"input_ids": row[:-1], "labels": row[1:]}


class Pictures(Dataset[Any]):
    """Noise with a label."""

    def __init__(self, rows: int, side: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pictures = torch.randn(rows, 3, side, side, generator=generator)
        self.labels = torch.randint(0, 10, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pictures[index], self.labels[index]


class Module(pl.LightningModule):
    """What both nets share: they note each loss, and can step a scheduler with each step."""

    def __init__(self, batch_size: int, scheduled: bool = False) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.scheduled = scheduled
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        if not self.scheduled:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def loss(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError


class Transformer(Module):
    """A language model of two encoder layers with dropout."""

    def __init__(
        self, batch_size: int = 2, rows: int = 96, seq_len: int = 16, width: int = 32, scheduled: bool = False
    ) -> None:
        super().__init__(batch_size, scheduled)
        self.rows, self.seq_len = rows, seq_len
        self.embed = nn.Embedding(len(WORDS), width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(WORDS))

    def loss(self, batch: Any) -> torch.Tensor:
        logits = self.head(self.encoder(self.embed(batch["input_ids"])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def train_dataloader(self) -> Any:
        return DataLoader(Text(self.rows, self.seq_len), batch_size=self.batch_size, shuffle=True)


class ConvNet(Module):
    """Two convolutions with BatchNorm and dropout, a buffer that is not saved, and a counter."""

    def __init__(
        self, batch_size: int = 2, rows: int = 96, side: int = 16, width: int = 8, scheduled: bool = False
    ) -> None:
        super().__init__(batch_size, scheduled)
        self.rows, self.side = rows, side
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.steps_taken = 0

    def loss(self, batch: Any) -> torch.Tensor:
        pictures, labels = batch
        self.seen += len(pictures)
        self.steps_taken += 1
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def train_dataloader(self) -> Any:
        return DataLoader(Pictures(self.rows, self.side), batch_size=self.batch_size, shuffle=True)


def trainer(**options: Any) -> pl.Trainer:
    """A trainer, on the CPU if nothing else is asked for, that writes and shows nothing."""
    return pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": 1,
            **options,
        },
    )


def without_peak(log: str) -> str:
    """A `CSVLogger`'s file without what the finder logs as a fit ends: its last row, and its column."""
    rows = list(csv.DictReader(log.splitlines()))
    assert rows.pop()["batchfinder/peak_reserved_bytes"]
    assert {row.pop("batchfinder/peak_reserved_bytes") for row in rows} == {""}
    return "".join(",".join(row) + "\n" for row in (list(rows[0]), *(list(row.values()) for row in rows)))
