"""How a try of a loop ends: a size that settles fits, and what is frozen for it is unfrozen however it ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from batchfinder import tune_batch_size
from batchfinder.errors import InvalidValue
from tests.settling_card import ANSWER, SettlingCard, step


@pytest.mark.parametrize("cap", [80, 81, 86, 90, 200])
def test_a_size_that_needs_the_cache_given_back_does_not_fit(cap: int) -> None:
    """Neither one that needs it in its first steps, nor one that needs it in each step."""
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


@pytest.fixture
def not_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is frozen as the test begins, and what is frozen is counted each time."""
    monkeypatch.setattr(gc, "get_freeze_count", gc.get_freeze_count.__wrapped__)
    gc.unfreeze()
    yield
    gc.freeze()


def _raises(batch: Any) -> None:
    raise ValueError("the labels are wrong")


@pytest.mark.usefixtures("not_frozen")
@pytest.mark.parametrize("fails", ["the first try", "the copy of the state"])
def test_gc_is_unfrozen_when_the_start_fails(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that stayed frozen would never be collected for the rest of the program."""
    model = torch.nn.Linear(1, 1)
    seen: list[int] = []

    def train_step(batch: torch.Tensor) -> None:
        seen.append(gc.get_freeze_count())
        _raises(batch)

    if fails != "the first try":
        monkeypatch.setattr("batchfinder.loop.options.LoopConfig.capture", lambda *a, **b: _raises(None))
    with pytest.raises(ValueError, match="the labels are wrong"):
        tune_batch_size(train_step, lambda batch_size, seq_len: torch.ones(batch_size, 1), [model], cache=False)
    assert gc.get_freeze_count() == 0
    assert all(seen)


@pytest.mark.usefixtures("not_frozen")
def test_a_user_who_has_frozen_keeps_it_so() -> None:
    """It is not for a search to unfreeze."""
    model = torch.nn.Linear(1, 1)
    gc.freeze()
    with pytest.raises(ValueError, match="the labels are wrong"):
        tune_batch_size(_raises, lambda batch_size, seq_len: torch.ones(batch_size, 1), [model], cache=False)
    assert gc.get_freeze_count() > 0


def test_without_room_for_a_sequence_of_sizes_nothing_is_tried() -> None:
    """Limits that leave no size are refused before the first call."""
    model = torch.nn.Linear(1, 1)
    with pytest.raises(InvalidValue, match=r"max_batch_size: .*4"):
        tune_batch_size(_raises, lambda size, seq_len: None, [model], max_batch_size=4, multiple_of=8, cache=False)
