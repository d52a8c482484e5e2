"""What a search may leave changed, as digests that can be compared bit for bit."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterable

import numpy
import torch
from torch import nn


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of the training state and of the process's random numbers.

    Args:
        model: what is trained.
        optimizer: its optimizer.
    """
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


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """The names of what is not the same."""
    return [name for name in before if before[name] != after[name]]


def _digest(*parts: Iterable[object]) -> str:
    found = hashlib.sha256()
    for part in parts:
        for item in part:
            if isinstance(item, torch.Tensor):
                item = (item.dtype, tuple(item.shape), item.detach().cpu().numpy().tobytes())
            found.update(pickle.dumps(item))
    return found.hexdigest()
