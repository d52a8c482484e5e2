"""The same work for every peer: a net, its batches, its steps, and the memory it has."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy
import torch
from torch import nn

from batchfinder.devices.device import memory_fraction
from batchfinder.measure import host_limits
from benchmarks.peer.card import SimulatedCard
from benchmarks.peer.meter import Meter
from benchmarks.peer.nets import NETS
from benchmarks.peer.state import state_of

STEPS = 3
"""Training steps that a size must take to count as one that trains."""

SAMPLES = 16384
"""In the data set; more than any answer."""


@dataclass
class Work:
    """What is to be trained, with nothing built yet.

    Attributes:
        net: a name in `NETS`.
        cap: no larger size is of use; None without a cap.
        device: `cpu` or `cuda`.
        budget_bytes: what training may take, the model included; None where the card is simulated.
        card: simulated, None for the real memory.
        meter: counts.
        seconds: what the search took, once it has ended.
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
        """Seed what is random, set the limit, and start the clock: from here on training may take the budget."""
        self.seed()
        if self.budget_bytes is not None:
            self._limit(self.budget_bytes)
        self._started = time.perf_counter()

    def end(self) -> None:
        """The search is over: stop the clock, and lift the limit."""
        self.seconds = time.perf_counter() - self._started
        if self.budget_bytes is not None and self.device == "cpu":
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

    def seed(self) -> None:
        """Set Python's, NumPy's and PyTorch's random numbers."""
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)

    def _limit(self, budget_bytes: int) -> None:
        if self.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(memory_fraction(budget_bytes, total), 0)
            return
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (host_limits.size_bytes() + budget_bytes, hard))

    def model(self) -> nn.Module:
        """The net, in training."""
        return NETS[self.net].build().to(self.device).train()

    def batch(self, batch_size: int) -> torch.Tensor:
        """A batch, on the device."""
        return NETS[self.net].batch(batch_size).to(self.device)

    def loss(self, model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        """A forward, counted; on a simulated card it takes the memory of the whole step."""
        self.meter.begin(len(batch))
        card, batch_size = self.card, len(batch)
        if card is None:
            return model(batch)
        card.forward(batch_size)
        loss = model(batch)
        loss.register_hook(lambda gradient: card.backward(batch_size))
        return loss

    def training(self) -> Training:
        """A plain loop's model, optimizer and step."""
        return Training(self)


class Training:
    """A model and an optimizer, and what a loop does with a batch.

    Args:
        work: what is trained.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.model = work.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, batch: torch.Tensor) -> None:
        """One optimizer step."""
        with self.work.meter.watching(self.work.device):
            self.work.loss(self.model, batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self, batch_size: int) -> int:
        """What a function peer is given to call: a training of a few steps. Returns the size."""
        for _ in range(STEPS):
            self.step(self.work.batch(batch_size))
        return batch_size

    def state(self) -> dict[str, str]:
        """Digests of all that a search may change."""
        return state_of(self.model, self.optimizer)
