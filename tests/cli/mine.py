"""Code of a user's, some of it broken: `--model mine:NAME` in this folder."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from batchfinder import Workload

WIDTH = 256


class Tiny(nn.Module):
    """Two linear layers; what it does beside that is for its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meanwhile(x)
        out: torch.Tensor = self.second(self.first(x).relu())
        return out

    def meanwhile(self, x: torch.Tensor) -> None:
        """Do nothing."""


class Aborts(Tiny):
    def meanwhile(self, x: torch.Tensor) -> None:
        torch.relu(x)
        print("goodbye", flush=True)
        os.abort()


class Exits(Tiny):
    def meanwhile(self, x: torch.Tensor) -> None:
        print("no more", flush=True)
        os._exit(7)


class OutOfRange(nn.Module):
    """Looks a token up that there is not: on a card, a device-side assertion that kills the context."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(ids + 1000)
        return out


class Raises(Tiny):
    def meanwhile(self, x: torch.Tensor) -> None:
        raise RuntimeError("no answer today")


class Slow(Tiny):
    def meanwhile(self, x: torch.Tensor) -> None:
        time.sleep(600)


class Changes(Tiny):
    """Keeps one more tensor in every seventh size, so that sizes do not scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        return out.exp() if x.size(0) % 7 == 0 else out


class Normed(nn.Sequential):
    """Needs two samples to train."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH))


def vectors(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
    """One batch of vectors."""
    return (torch.zeros(batch_size, WIDTH),)


def sequences(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
    """One batch of sequences of vectors."""
    return (torch.zeros(batch_size, seq_len or 1, WIDTH),)


def tiny() -> Workload:
    """Works, up to 96 tokens."""
    return Workload(Tiny(), sequences, max_seq_len=96)


def undeclared() -> Workload:
    """Works, and its samples have one shape, which it does not say."""
    return Workload(Tiny(), vectors)


def shapeless() -> Workload:
    """Works, and its samples have one fixed shape."""
    return Workload(Tiny(), sequences, seq_len_unit="none")


def normed() -> Workload:
    """Works with two samples or more of one fixed shape."""
    return Workload(Normed(), vectors, seq_len_unit="none")


def changes() -> Workload:
    """Works, and does not scale."""
    return Workload(Changes(), sequences)


def own_optimizer() -> Workload:
    """Works, and brings its optimizer."""
    return Workload(Tiny(), sequences, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def aborts() -> Workload:
    """Ends the process in its forward."""
    return Workload(Aborts(), sequences)


def exits() -> Workload:
    """Ends the process in its forward, in a way that says nothing of memory."""
    return Workload(Exits(), sequences)


def out_of_range() -> Workload:
    """Kills the context of a card in its forward."""
    return Workload(
        OutOfRange(), lambda batch_size, seq_len: (torch.zeros(batch_size, seq_len or 1, dtype=torch.long),)
    )


def fails_in_forward() -> Workload:
    """Raises in its forward."""
    return Workload(Raises(), sequences)


def slow_to_record() -> Workload:
    """Takes for ever in its forward."""
    return Workload(Slow(), sequences)


def slow_to_build() -> Workload:
    """Takes for ever to be built."""
    time.sleep(600)
    return tiny()


def raises() -> Workload:
    """Raises."""
    raise ValueError("no model today")


def rubbish() -> int:
    """Is no factory at all."""
    return 42


number = 42
