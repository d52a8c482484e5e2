"""Steps that need two samples, and steps that catch an out-of-memory, through `tune_batch_size` on real nets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder import tune_batch_size
from tests.loop.loops import MESSAGE


def batch_norm() -> tuple[nn.Module, Callable[[Any], torch.Tensor], Any]:
    """BatchNorm1d over single values."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return net, lambda batch: net(batch).square().mean(), lambda size, seq_len: torch.randn(size, 4)


def small_pictures() -> tuple[nn.Module, Callable[[Any], torch.Tensor], Any]:
    """A residual net of five stages on 32x32 pictures, whose last stage sees one pixel."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width)
            self.shortcut = nn.Conv2d(width, width, 1, 2)

        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.norm(self.conv(pictures)) + self.shortcut(pictures))

    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *(Block(4) for _ in range(5)), nn.Flatten(), nn.Linear(4, 1))
    return net, lambda batch: net(batch).square().mean(), lambda size, seq_len: torch.randn(size, 3, 32, 32)


def pairs() -> tuple[nn.Module, Callable[[Any], torch.Tensor], Any]:
    """A loss over pairs of samples, of which one sample has none."""
    net = nn.Linear(4, 8)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        first, second = torch.triu_indices(len(batch), len(batch), 1)
        embedded = net(batch)
        return torch.stack([embedded[i] - embedded[j] for i, j in zip(first, second, strict=True)]).square().mean()

    return net, loss_of, lambda size, seq_len: torch.randn(size, 4)


def tuned(
    loss_of: Callable[[Any], torch.Tensor],
    net: nn.Module,
    make_batch: Any,
    swallow: bool = False,
    error: type[Exception] = torch.OutOfMemoryError,
) -> Any:
    """Tune exactly, up to 12 samples, of which 9 fit; with `swallow` the step catches its errors."""
    optimizer = torch.optim.Adam(net.parameters())

    def train_step(batch: torch.Tensor) -> None:
        try:
            if len(batch) > 9:
                raise error(MESSAGE)
            loss_of(batch).backward()
        except RuntimeError:
            if not swallow:
                raise
            return
        optimizer.step()
        optimizer.zero_grad()

    return tune_batch_size(train_step, make_batch, [net, optimizer], max_batch_size=12, tolerance=0, cache=False)


@pytest.mark.parametrize("model", [batch_norm, small_pictures, pairs])
def test_what_needs_two_samples_is_served(model: Any) -> None:
    """Without being asked: the search goes on from 2 where 1 raises, and says so."""
    net, loss_of, make_batch = model()
    found = tuned(loss_of, net, make_batch)
    assert found.batch_size == 9
    assert "; from 2 on, since batch size 1 raised " in str(found)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError, "and the step caught the error and went on"),
        (RuntimeError, "no optimizer stepped, as they do at other sizes"),  # as of a library with memory of its own
    ],
)
def test_a_step_that_catches_an_out_of_memory_does_not_fit(error: type[Exception], words: str) -> None:
    """PyTorch's error is counted. After another no optimizer steps in such a try. The trial says so."""
    net = nn.Linear(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the optimizer did not step
        found = tuned(lambda batch: net(batch).mean(), net, lambda size, seq_len: torch.randn(size, 4), True, error)
    assert found.batch_size == 9
    failed = [trial.measurement.message for trial in found.result.trials if not trial.fits]
    assert failed
    assert all(words in message for message in failed)


@pytest.mark.parametrize("model", [lambda: (nn.Linear(4, 1), None, None), batch_norm])
def test_a_cached_size_at_which_the_step_catches_an_out_of_memory_does_not_fit(tmp_path: Path, model: Any) -> None:
    """Its one trial is the first of the start: a smaller one says whether the optimizer steps at all."""
    net = model()[0]
    optimizer = torch.optim.Adam(net.parameters())
    limit = 9

    def train_step(batch: torch.Tensor) -> None:
        try:
            if len(batch) > limit:
                raise torch.OutOfMemoryError(MESSAGE)
            net(batch).mean().backward()
        except RuntimeError:
            return
        optimizer.step()
        optimizer.zero_grad()

    def tune() -> Any:
        make_batch = lambda size, seq_len: torch.randn(size, 4)  # noqa: E731
        options = {"max_batch_size": 12, "tolerance": 0, "cache": str(tmp_path)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return tune_batch_size(train_step, make_batch, [net, optimizer], **options)

    assert tune().batch_size == 9
    limit = 6
    found = tune()
    assert found.batch_size == 6
    assert "lowered from 9, which ran before; when it was tried again" in str(found)


def test_a_step_that_catches_it_after_the_first_does_not_fit() -> None:
    """Adam's state comes with the first step, and the peak with the second: that one step is not enough. Nor is it
    waited for long where earlier sizes stepped in each call.
    """
    net = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters())
    calls: list[int] = []

    def train_step(batch: torch.Tensor) -> None:
        calls.append(len(batch))
        try:
            if len(batch) > 9 and optimizer.state:
                raise RuntimeError(MESSAGE)  # as of a library with memory of its own
            net(batch).mean().backward()
            optimizer.step()
        except RuntimeError:
            pass
        optimizer.zero_grad()

    def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
        return torch.randn(batch_size, 4)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tune_batch_size(train_step, make_batch, [net, optimizer], max_batch_size=12, tolerance=0, cache=False)
    assert found.batch_size == 9
    failed = [trial for trial in found.result.trials if not trial.fits]
    assert failed
    assert all("optimizers stopped stepping" in trial.measurement.message for trial in failed)
    assert all(calls.count(trial.batch_size) <= 32 for trial in failed)
