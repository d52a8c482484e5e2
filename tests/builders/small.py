"""Models small enough to count their memory by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfinder.training.step import Workload

IN, HIDDEN, OUT = 256, 1024, 128


def vectors(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
    """One batch of vectors."""
    return (torch.zeros(batch_size, IN),)


def tokens(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
    """One batch of sequences of vectors."""
    return (torch.zeros(batch_size, seq_len or 1, IN),)


class Mlp(nn.Module):
    """Linear, ReLU, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.act = nn.ReLU()
        self.second = nn.Linear(HIDDEN, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.act(self.first(x)))
        return out


def mlp() -> Workload:
    """A two-layer perceptron on vectors."""
    return Workload(Mlp(), vectors)


class Checkpointed(nn.Module):
    """Blocks of two linear layers and a GELU, each recomputed in the backward or not."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(IN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, IN)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def checkpointed() -> Workload:
    """Four blocks that are recomputed."""
    return Workload(Checkpointed(True), vectors)


def not_checkpointed() -> Workload:
    """The same four blocks, kept."""
    return Workload(Checkpointed(False), vectors)


class Twice(nn.Module):
    """The same linear layer twice, whose input wants no gradient the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(IN, IN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.shared(self.shared(x))
        return out


def twice() -> Workload:
    """One weight, used twice."""
    return Workload(Twice(), vectors)


class Dropped(nn.Module):
    """A linear layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.linear(x))
        return out


def dropped() -> Workload:
    """Dropout after a linear layer."""
    return Workload(Dropped(), vectors)


class Reading(nn.Module):
    """Reads values from tensors in one of the ways that real code does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, HIDDEN)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        mask = out > 0
        if self.way == "item":
            return out * out.sum().item()
        if self.way == "bool":
            return out if bool(mask.all()) else out.exp()
        if self.way == "ones":
            return out if bool(torch.ones(3, device=x.device).bool().all()) else out.exp()
        if self.way == "sum":
            return out if bool(mask.sum() == mask.numel()) else out.exp()
        if self.way == "equal":
            return out.exp() if bool(out.sum() == 0) else out
        if self.way == "mask":
            return out[mask]
        if self.way == "nonzero":
            return out.view(-1)[: torch.nonzero(mask).size(0)]
        if self.way == "tolist":
            return out * out[0].tolist()[0]
        if self.way == "numpy":
            return out * x.cpu().numpy()[0, 0]
        if self.way == "written":
            count = torch.zeros((), device=x.device)
            count += 16 * out.detach()[0, 0]
            return out * count.item()
        if self.way == "asserted":
            assert (out < 7).sum() < 8
            assert out.isfinite().any()
            return out
        if self.way == "filled":
            return out * out.detach().mean().fill_(3).item()
        if self.way.startswith("known"):
            return out * self._known(x)
        if self.way == "eigenvalues":
            return out * torch.linalg.eigvals(x[:4, :4]).real.sum()
        raise AssertionError(self.way)

    def _known(self, x: torch.Tensor) -> int:
        """Numbers that come from no weight: 3 of 5 are selected."""
        numbers = torch.arange(5, device=x.device)
        mask = numbers > 1
        if self.way == "known count":
            return int(mask.sum())
        if self.way == "known shape":
            return int(numbers[mask].numel()) + torch.nonzero(mask).size(0) + numbers.repeat_interleave(numbers).size(0)
        if self.way == "known to the CPU":
            return int(numbers.cpu()[4] * torch.tensor([numbers[1]], device=x.device)[0])
        view = numbers[:2]
        view += (self.linear(x)[:2, 0] > 0).long() if self.way == "known no more" else 1
        if self.way == "known in floating point":
            return int((((1.0 - mask.float()) * torch.finfo(torch.float32).min) < 0).sum() * x[:1, 0].cos().ceil()[0])
        return int(numbers.sum())


class Recurrent(nn.Module):
    """An LSTM over a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(IN, HIDDEN, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(x[:, None, :].expand(-1, 3, -1))[0]
        return out


def recurrent() -> Workload:
    """A recurrent model, which a GPU would run with cuDNN."""
    return Workload(Recurrent(), vectors)


def convolution() -> Workload:
    """One convolution over the vectors, taken as signals."""
    return Workload(nn.Sequential(nn.Unflatten(1, (1, IN)), nn.Conv1d(1, 4, 3)), vectors)


def reading(way: str) -> Workload:
    """A model that reads a value."""
    return Workload(Reading(way), vectors)


class Attention(nn.Module):
    """`scaled_dot_product_attention` and nothing else that is large."""

    def __init__(self, heads: int = 4, key_heads: int = 4, head: int = 64, **options: Any) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head, self.options = heads, key_heads, head, options
        self.query = nn.Linear(IN, heads * head)
        self.key = nn.Linear(IN, key_heads * head)
        self.value = nn.Linear(IN, key_heads * head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def split(layer: nn.Module, heads: int) -> torch.Tensor:
            out: torch.Tensor = layer(x)
            return out.view(batch, length, heads, self.head).transpose(1, 2)

        return nn.functional.scaled_dot_product_attention(
            split(self.query, self.heads),
            split(self.key, self.key_heads),
            split(self.value, self.key_heads),
            enable_gqa=self.heads != self.key_heads,
            **self.options,
        )


def attention(**options: Any) -> Workload:
    """Attention over sequences of vectors."""
    return Workload(Attention(**options), tokens)


class RaisesInBackward(torch.autograd.Function):
    """Raises where its gradient should be computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient today")


class Failing(nn.Module):
    """Fails at one place when the batch is of 13 samples, and works at any other size."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, HIDDEN)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        if x.size(0) != 13:
            return out
        if self.where == "forward":
            raise RuntimeError("no answer today")
        return RaisesInBackward.apply(out)


def failing(where: str) -> Workload:
    """A workload that fails in make_batch, forward or backward."""

    def make_batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
        if batch_size == 13 and where == "make_batch":
            raise LookupError("no data today")
        return vectors(batch_size, seq_len)

    return Workload(Failing(where), make_batch)


def leaving() -> Workload:
    """Ends the process."""
    import os

    print("my last words", flush=True)
    os._exit(3)


def slow() -> Workload:
    """Takes very long to make a batch."""
    import time

    def make_batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
        time.sleep(600)
        return vectors(batch_size, seq_len)

    return Workload(Mlp(), make_batch)
