"""The training that every finder is given: nets, batches, steps, the memory limit, and digests of the state."""

from __future__ import annotations

import hashlib
import pickle
import random
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy
import torch
from torch import nn

from batchfinder.devices.catalog import memory_fraction
from batchfinder.measure import host_limits
from benchmarks.peer.card import Meter, SimulatedCard

VOCABULARY = 256

STEPS = 3
"""Training steps that a size must survive to count as one that trains."""

SAMPLES = 16384
"""In the data set; more than any answer."""


class Transformer(nn.Module):
    """Two encoder layers with dropout, mean pooling, and a classifier; the first token gives the label."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The loss of token ids of shape (batch, length)."""
        return nn.functional.cross_entropy(self.head(self.encoder(self.embed(input_ids)).mean(1)), input_ids[:, 0] % 10)


class ConvNet(nn.Module):
    """Three convolutions with batch normalization, dropout, and a classifier; the first pixel's sign is the label."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 8, 16, 16)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
                for before, after in pairwise(channels)
            ),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of images of shape (batch, 3, height, width)."""
        return nn.functional.cross_entropy(self.head(self.layers(x).mean((2, 3))), (x[:, 0, 0, 0] > 0).long())


class Small(nn.Module):
    """For simulated cards: has all that a search may change (weights, buffers, optimizer state, random numbers)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of numbers of shape (batch, 4). Batch normalization needs two samples: a single one is repeated."""
        return self.layers(x if len(x) > 1 else x.repeat(2, 1)).square().mean()


@dataclass(frozen=True)
class Net:
    """A net and its samples.

    Attributes:
        build: makes it.
        sample: one sample's shape.
        integer: whether samples are token ids.
    """

    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    integer: bool = False

    def batch(self, batch_size: int) -> torch.Tensor:
        """Random samples."""
        if self.integer:
            return torch.randint(0, VOCABULARY, (batch_size, *self.sample))
        return torch.randn(batch_size, *self.sample)


NETS = {
    "transformer": Net(Transformer, (512,), integer=True),
    "conv net": Net(ConvNet, (3, 384, 384)),
    "small": Net(Small, (4,)),
}


@dataclass
class Work:
    """What is to be trained, with nothing built yet.

    Attributes:
        net: a name in `NETS`.
        cap: the largest size to try; None without a cap.
        device: `cpu` or `cuda`.
        budget_bytes: what training may take, the model included; None on a simulated card.
        card: the simulated card; None for real memory.
        meter: counts steps and errors.
        seconds: how long the search took, once it has ended.
    """

    net: str
    cap: int | None = None
    device: str = "cpu"
    budget_bytes: int | None = None
    card: SimulatedCard | None = None
    meter: Meter = field(default_factory=Meter)
    seconds: float = 0.0
    _started: float = 0.0

    def begin(self) -> None:
        """Seed the random numbers, set the memory limit to what is in use now plus the budget, and start the clock."""
        self.seed()
        if self.budget_bytes is not None and self.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(memory_fraction(self.budget_bytes, total), 0)
        elif self.budget_bytes is not None:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (host_limits.size_bytes() + self.budget_bytes, hard))
        self._started = time.perf_counter()

    def end(self) -> None:
        """Read the clock, and on a CPU lift the limit."""
        self.seconds = time.perf_counter() - self._started
        if self.budget_bytes is not None and self.device == "cpu":
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

    def seed(self) -> None:
        """Seed Python's, NumPy's and PyTorch's random numbers."""
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)

    def model(self) -> nn.Module:
        """The net on the device, in training mode."""
        return NETS[self.net].build().to(self.device).train()

    def batch(self, batch_size: int) -> torch.Tensor:
        """A batch on the device."""
        return NETS[self.net].batch(batch_size).to(self.device)

    def loss(self, model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        """A forward, counted by the meter, that takes the recorded step's memory on a simulated card."""
        self.meter.begin(len(batch))
        card, batch_size = self.card, len(batch)
        if card is None:
            return model(batch)
        card.forward(batch_size)
        loss = model(batch)
        loss.register_hook(lambda gradient: card.backward(batch_size))
        return loss


class TrainingLoop:
    """A model, an optimizer, and the steps of a plain loop."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.model = work.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, batch: torch.Tensor) -> None:
        """One optimizer step."""
        with self.work.meter.counting_errors(self.work.device):
            self.work.loss(self.model, batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self, batch_size: int) -> int:
        """Train a few steps, and return the size."""
        for _ in range(STEPS):
            self.step(self.work.batch(batch_size))
        return batch_size

    def state(self) -> dict[str, str]:
        """Digests of all that a search may change."""
        return state_digests(self.model, self.optimizer)


def state_digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of the training state and of the process's random numbers, equal only if all bits are."""
    states = [
        (key, value)
        for parameter in model.parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    ]
    return {
        "parameters": _digest(model.parameters()),
        "buffers": _digest(model.buffers()),
        "gradients": _digest(parameter.grad for parameter in model.parameters()),
        "optimizer": _digest([key for key, _ in states], (value for _, value in states)),
        "random numbers": _digest(random.getstate(), numpy.random.get_state(), [torch.get_rng_state()]),
    }


def changed(before: dict[str, str], after: dict[str, str]) -> tuple[str, ...]:
    """The names of the digests that differ."""
    return tuple(name for name in before if before[name] != after[name])


def _digest(*parts: Iterable[object]) -> str:
    found = hashlib.sha256()
    for part in parts:
        for item in part:
            if isinstance(item, torch.Tensor):
                item = (item.dtype, tuple(item.shape), item.detach().cpu().numpy().tobytes())
            found.update(pickle.dumps(item))
    return found.hexdigest()
