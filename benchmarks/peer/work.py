"""The trainings that every finder is given, their plain loop, and digests of their state."""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice, repeat
from typing import Any

import numpy
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import default_collate

from batchfinder.devices import find_gpu
from batchfinder.units import MIB
from benchmarks.random_fit.draw import Fit
from benchmarks.random_fit.parts import Module, padded
from benchmarks.random_fit.run import BATCHES, EPOCHS, MOST_BATCHES


def case(net: str, width: int, layers: int, longest: int, lengths: str, card: str, **others: Any) -> Fit:
    """A training with AdamW in fp32 on all of a card, or on `memory_bytes` of it."""
    gpu = find_gpu(card)
    plain: dict[str, Any] = {
        "seed": 0,
        "vocabulary": 30_000,
        "samples": 20_011,
        "mask": False,
        "shuffle": True,
        "drop_last": False,
        "optimizer": "adamw",
        "precision": "32-true",
        "clip": False,
        "accumulation": 1,
        "checkpointing": False,
        "compiled": False,
        "adapter": "",
        "average": False,
        "validation": "none",
        "validation_batch_size": 8,
        "resumed": False,
        "expandable": False,
        "memory_bytes": gpu.usable_bytes,
        "elsewhere_bytes": 0,
        "held_bytes": 0,
    }
    return Fit(net=net, width=width, layers=layers, longest=longest, lengths=lengths, card=card, **{**plain, **others})


CASES = (
    case("bert", 768, 4, 256, "fixed", "T4"),
    case("bert", 768, 4, 256, "free", "T4"),
    case("gpt2", 768, 4, 512, "fixed", "V100 16GB", samples=4001),
    case("gpt2", 1024, 4, 384, "free", "RTX 4090", samples=4001),
    case("conv", 96, 4, 112, "fixed", "RTX 4090"),
    case("bert", 1024, 4, 256, "free", "A100 40GB", samples=30_011),
    case("lstm", 1024, 2, 256, "fixed", "A100 40GB", samples=10_007),
    case("lstm", 1024, 2, 256, "free", "RTX 4090", samples=10_007),
)
STATE = case("bert", 64, 2, 64, "fixed", "T4", vocabulary=1000, memory_bytes=256 * MIB)
"""So small that the stub computes the values of its weights; for the training state alone."""


def name_of(fit: Fit) -> str:
    """In tables."""
    lengths = {"fixed": str(fit.longest), "free": f"8 to {fit.longest}"}[fit.lengths]
    return f"{fit.net}, {fit.layers} x {fit.width}, at {lengths}, on {fit.card}"


def steps_of(fit: Fit, batch_size: int) -> int:
    """Optimizer steps of a training: as many as random fits take."""
    if fit == STATE:
        return 3
    epoch = -(-fit.samples // batch_size)
    return min(MOST_BATCHES, max(BATCHES, EPOCHS * epoch + 3))


class WithoutValidation(Module):
    """Lightning's finder refuses a loader without a batch."""

    validation_step = pl.LightningModule.validation_step
    val_dataloader = pl.LightningModule.val_dataloader


@cache
def _built(fit: Fit) -> Module:
    return WithoutValidation(fit, 2)


def module_of(fit: Fit, batch_size: int = 2) -> Module:
    """A copy of the case's module, on the CPU. Weights take long, so they are made once, in the process that forks."""
    module = copy.deepcopy(_built(fit))
    module.batch_size = batch_size
    return module


def on_card(batch: Any) -> Any:
    """A batch as the loader gives it, on the card."""
    return {key: value.cuda() for key, value in batch.items()} if isinstance(batch, dict) else batch.cuda()


def longest_batch(module: Module, batch_size: int) -> Any:
    """A batch of the longest sample, collated as the loader does."""
    samples = module.train_dataloader().dataset
    longest = max(range(len(samples)), key=samples.lengths.__getitem__)
    return (padded if samples.tokens else default_collate)([samples[longest]] * batch_size)


class Loop:
    """A model on the card, an optimizer, and the steps of a plain loop."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.module = module_of(fit).cuda()
        self.optimizer = self.module.configure_optimizers()

    def step(self, batch: Any) -> None:
        """One optimizer step."""
        self.module.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, batch_size: int) -> int:
        """Train epoch after epoch, and return the size."""
        self.module.batch_size = batch_size
        epochs: Iterator[Any] = chain.from_iterable(repeat(self.module.train_dataloader()))
        for batch in islice(epochs, steps_of(self.fit, batch_size)):
            self.step(on_card(batch))
        return batch_size

    def state(self) -> dict[str, str]:
        """Digests of all that a search may change."""
        return state_digests(self.module, self.optimizer) if self.fit == STATE else {}


def seed(number: int) -> None:
    """Seed Python's, NumPy's and PyTorch's random numbers."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def state_digests(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """Digests of the training state and of the process's random numbers, equal only if all bits are."""
    states = [
        (key, value)
        for parameter in model.parameters()
        for key, value in sorted((optimizer.state if optimizer else {}).get(parameter, {}).items())
    ]
    return {
        "parameters": _digest(model.parameters()),
        "gradients": _digest(parameter.grad for parameter in model.parameters()),
        "optimizer": _digest([key for key, _ in states], (value for _, value in states)),
        "random numbers": _digest(
            random.getstate(), numpy.random.get_state(), [torch.get_rng_state(), torch.cuda.get_rng_state()]
        ),
    }


def _digest(*parts: Iterable[object]) -> str:
    found = hashlib.sha256()
    for part in parts:
        for item in part:
            if isinstance(item, torch.Tensor):
                item = (item.dtype, tuple(item.shape), item.detach().cpu().numpy().tobytes())
            found.update(pickle.dumps(item))
    return found.hexdigest()
