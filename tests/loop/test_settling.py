"""A size that needs the cache given back in its first steps fits; one that needs it in each step does not."""

from __future__ import annotations

from collections.abc import Generator
from unittest.mock import patch

import pytest
import torch

from batchfinder import executable_batch_size, tune_batch_size
from tests.settling_card import ANSWER, SettlingCard, step


@pytest.mark.parametrize("cap", [80, 81, 86, 90, 200])
def test_tune_batch_size(cap: int) -> None:
    """Whatever the first steps did, a size that goes on without is the answer; above the largest such, none is."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: torch.Tensor) -> None:
        step(len(batch))
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with patch("batchfinder.loop.tune.memory_of", lambda device, budget: SettlingCard()):
        found = tune_batch_size(
            train_step,
            lambda batch_size, seq_len: torch.ones(batch_size, 1),
            [model, optimizer],
            max_batch_size=cap,
            tolerance=0.0,
            cache=False,
        )
    assert found.batch_size == min(cap, ANSWER)


@pytest.mark.parametrize(("steps", "answer"), [(50, ANSWER), (3, 95)])
def test_executable_batch_size(steps: int, answer: int) -> None:
    """As many steps of the function are taken; one that ends before its size has settled has shown that it trains."""

    @executable_batch_size(cache=False, tolerance=0.0)
    def train(batch_size: int) -> Generator[None, None, int]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            step(batch_size)
            model(torch.ones(batch_size, 1)).sum().backward()
            optimizer.step()
            yield
        return batch_size

    with patch("batchfinder.loop.executable.memory_of", lambda device, budget: SettlingCard()):
        assert train() == answer
