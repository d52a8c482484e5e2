"""Plain training loops with all that people put into one: a scheduler, an average of the weights, counters, noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."
WORDS = 14
SEQ_LEN = 8
STAGE = ["forward"]  # which part of a step runs; not an attribute of anything that is put back


class Transformer(nn.Module):
    """A language model of one encoder layer with dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class ConvNet(nn.Module):
    """A convolution with BatchNorm and dropout, a buffer that is not saved, a counter, and a part in eval mode."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        )
        self.frozen = nn.Linear(10, 10).eval().requires_grad_(False)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.forwards = 0

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        self.seen += len(pictures)
        self.forwards += 1
        self.frozen.train()
        return self.frozen(self.net(pictures))


class Average:
    """An average of the weights, kept in Python."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, value in model.named_parameters():
            self.shadow[name] = self.shadow[name] * 0.9 + value.detach() * 0.1


def tokens(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Random text, and the same for labels."""
    text = torch.randint(0, WORDS, (batch_size, seq_len or SEQ_LEN))
    return text, text


def pictures(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with labels, from three generators."""
    noise = torch.randn(batch_size, 3, 4, 4) * float(np.random.rand()) + random.random()
    return noise, torch.randint(0, 10, (batch_size,))


NETS: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "transformer": (Transformer, tokens),
    "conv net": (ConvNet, pictures),
}


def make_loop(net: str, most: int | None = None, accumulate: bool = False) -> Any:
    """A loop that runs out of memory above `most` samples, seeded.

    Returns:
        Its `train_step`, `make_batch`, `state`, and the list of losses that it writes to.
    """
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    kind, make_batch = NETS[net]
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
    average = Average(model)
    losses: list[float] = []

    def one(batch: Any, share: float) -> None:
        STAGE[0] = "forward"
        inputs, labels = batch
        if most is not None and len(inputs) > most:
            raise torch.OutOfMemoryError(MESSAGE)
        outputs = model(inputs)
        STAGE[0] = "loss"
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten()) * share
        losses.append(loss.item())
        STAGE[0] = "backward"
        loss.backward()

    def step() -> None:
        STAGE[0] = "optimizer"
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        STAGE[0] = "average"
        average.update(model)

    def train_step(batch: Any) -> None:
        one(batch, 1.0)
        step()

    def train_on_micro_batches(micro_batches: Any) -> None:
        for batch in micro_batches:
            one(batch, 1 / len(micro_batches))
        step()

    return SimpleNamespace(
        train_step=train_on_micro_batches if accumulate else train_step,
        make_batch=make_batch,
        state=[model, optimizer, scheduler, average, losses],
        model=model,
        losses=losses,
    )
