"""Workloads that a child process builds: a transformer and a convolutional net that train, and ways to go wrong."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchfinder.training.step import Workload

VOCABULARY = 500


class Encoder(nn.Module):
    """Two transformer layers that predict their own input."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embedding(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def encoder(width: int = 128) -> Workload:
    """The transformer on random tokens."""
    return Workload(Encoder(width), lambda batch_size, seq_len: torch.randint(VOCABULARY, (batch_size, seq_len or 64)))


def convolutions() -> Workload:
    """A convolutional net with BatchNorm and dropout, on random images."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return Workload(model, lambda batch_size, seq_len: torch.randn(batch_size, 3, 32, 32))


class Misbehaving(nn.Module):
    """A linear layer that does something from a batch size on."""

    def __init__(self, deed: str, at: int, once: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.deed = deed
        self.at = at
        self.once = once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= self.at and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            print("about to misbehave", flush=True)
            self.misbehave()
        return self.layer(x)

    def misbehave(self) -> None:
        if self.deed == "raise":
            raise KeyError("a bug of the user's")
        if self.deed == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.deed == "bad_alloc":
            print("terminate called after throwing an instance of 'std::bad_alloc'", flush=True)
            os.abort()
        if self.deed == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, self.deed))


def misbehaving(**arguments: Any) -> Workload:
    """A net that misbehaves; `arguments` are `Misbehaving`'s."""
    return Workload(Misbehaving(**arguments), lambda batch_size, seq_len: torch.randn(batch_size, 16))


class OutOfRange(nn.Module):
    """Looks up a row that an embedding does not have, from a batch size on: on a card this kills the context."""

    def __init__(self, at: int, once: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.at = at
        self.once = once

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) >= self.at and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            ids = ids + VOCABULARY
        out: torch.Tensor = self.embedding(ids)
        return out


def out_of_range(**arguments: Any) -> Workload:
    """A net that looks up what is not there; `arguments` are `OutOfRange`'s."""
    return Workload(
        OutOfRange(**arguments), lambda batch_size, seq_len: torch.randint(VOCABULARY, (batch_size, seq_len or 8))
    )


class Attending(nn.Module):
    """Attention, with dropout or without."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 3 * 32)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.layer(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)


def attending(dropout: float) -> Workload:
    """Attention on random vectors."""
    return Workload(Attending(dropout), lambda batch_size, seq_len: torch.randn(batch_size, seq_len or 8, 32))


def unbuildable() -> Workload:
    """Raises while it is built."""
    raise ValueError("no such data set")
