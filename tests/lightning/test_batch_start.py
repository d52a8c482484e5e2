"""What a forward and backward change comes back: random numbers, buffers, metrics, attributes, gradients."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.aggregation import CatMetric

from batchfinder.lightning.micro_batching.recovery import BatchSnapshot


class Restless(nn.Module):
    """Changes all that it can in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(1)
        self.mean, self.all = MeanMetric(), CatMetric()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("maybe", None)
        self.seen: list[int] = [7]
        self.steps, self.last = 0, None
        self.torch_own = torch.Generator().manual_seed(1)
        self.numpy_own, self.numpy_old = np.random.default_rng(1), np.random.RandomState(1)
        self.python_own = random.Random(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.layer(x))
        self.mean.update(y.detach())
        self.all.update(y.detach())
        self.count += 1
        self.maybe = torch.ones(1)
        self.seen.append(1)
        self.steps += 1
        self.last = y
        self.new = "an attribute"
        return y

    def drawn(self) -> list[float]:
        """A number of each generator."""
        return [
            random.random(),
            float(np.random.rand()),
            float(torch.rand(1)),
            float(torch.rand(1, generator=self.torch_own)),
            float(self.numpy_own.random()),
            float(self.numpy_old.rand()),
            self.python_own.random(),
        ]


def seen(module: Restless) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "buffers": {name: buffer.tolist() for name, buffer in module.named_buffers()},
        "none": module.maybe is None,
        "metrics": (module.mean.mean_value.tolist(), module.mean.weight.tolist(), len(module.all.value)),
        "counts": (module.mean._update_count, module.all._update_count),
        "plain": (module.steps, list(module.seen), module.last, hasattr(module, "new"), module.training),
        "gradients": [None if p.grad is None else p.grad.tolist() for p in module.parameters()],
    }


def test_all_comes_back_as_often_as_needed() -> None:
    """In the objects that held it, which others may hold as well."""
    module, x = Restless(), torch.randn(3, 2)
    with torch.no_grad():
        module(x)  # the metrics and the lists have contents
    buffer, items, weight = module.norm.running_mean, module.seen, module.mean.weight
    before = seen(module)
    start = BatchSnapshot(module)
    drawn = module.drawn()
    for _ in range(2):
        module(x).sum().backward()
        module.eval()
        module.drawn()
        for parameter in module.parameters():
            parameter.grad = None  # nothing is noted of gradients until they are zeroed
        start.restore()
        assert seen(module) == before
        assert module.norm.running_mean is buffer
        assert module.seen is items
        assert module.mean.weight is weight
    assert module.drawn() == drawn


def test_gradients_are_those_that_zero_grad_left() -> None:
    """None, zeros, or what a zero_grad of the user's own keeps."""
    module, x = Restless(), torch.randn(3, 2)
    kept, zero, *others = module.parameters()
    kept.grad, zero.grad = torch.ones_like(kept), torch.zeros_like(zero)
    start = BatchSnapshot(module)
    start.gradients_zeroed()
    for _ in range(2):
        module(x).sum().backward()
        start.restore()
        assert torch.equal(kept.grad, torch.ones_like(kept))
        assert torch.equal(zero.grad, torch.zeros_like(zero))
        assert all(parameter.grad is None for parameter in others)


def test_what_a_failed_step_left_in_an_attribute_is_let_go() -> None:
    """A tensor that the module kept would hold the failed step's memory."""
    module = Restless()
    start = BatchSnapshot(module)
    module(torch.randn(3, 2))
    assert module.last is not None
    start.restore()
    assert module.last is None
