"""The smallest modules and data that Lightning trains, and what one run of them saw."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Rows(Dataset[Any]):
    """`size` different rows; `jitter` adds noise from torch's generator, as augmentation does."""

    def __init__(self, size: int, jitter: bool = False) -> None:
        self.size = size
        self.jitter = jitter

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.tensor([float(index), 1.0], dtype=torch.float64)
        return row + torch.rand(2, dtype=torch.float64) / 8 if self.jitter else row


class Stream(IterableDataset[Any]):
    """The same rows, one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return (torch.tensor([float(index), 1.0], dtype=torch.float64) for index in range(self.size))


class Tiny(pl.LightningModule):
    """Writes down every batch that it is given."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, dtype=torch.float64)
        self.seen: list[Any] = []
        self.loader = loader

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch)
        return (self.layer(batch) ** 2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch)
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Hooked(Tiny):
    """Makes its own loader, of `batch_size`."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(22), batch_size=self.batch_size, shuffle=True)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def trainer(**settings: Any) -> pl.Trainer:
    """A trainer that prints and writes nothing."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", devices=1, **{"max_epochs": 1, **quiet, **settings})


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether two runs saw the same batches, bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
