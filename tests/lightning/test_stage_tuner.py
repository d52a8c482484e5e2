"""What a search records first, what it leaves behind, and how far it is from the callback to the user's code."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader

import batchfinder
from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.oom_net import Bounded


class Noted(Bounded):
    """Remembers its data sets."""

    made: list[weakref.ref[Any]]

    def train_dataloader(self) -> Any:
        data = nets.Pictures(self.rows, self.side)
        self.made.append(weakref.ref(data))
        return DataLoader(data, batch_size=self.batch_size)


class Alive(pl.Callback):
    """Counts, after the finder's search, the data sets that are still there."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.count = sum(reference() is not None for reference in Noted.made)
        trainer.should_stop = True


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage collection but those that are asked for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_data_of_a_search_are_gone_with_it(no_collection: None) -> None:
    """Training has the room for which sizes were tried, and does not wait for a garbage collection to have it."""
    Noted.made = []
    finder, alive = BatchFinder(max_batch_size=8, cache=False), Alive()
    nets.trainer(callbacks=[finder, alive]).fit(Noted(most=5))
    assert finder.batch_size == 5
    assert len(Noted.made) > 0
    assert alive.count == 0


def test_nothing_stays_frozen_where_the_first_try_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector sees the user's objects again, whatever their step raised."""

    class Buggy(nets.ConvNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append("step")
            raise ValueError("the labels are wrong")

    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with pytest.raises(ValueError, match="the labels are wrong"):
        nets.trainer(callbacks=[BatchFinder(cache=False)]).fit(Buggy())
    assert calls == ["freeze", "step", "step", "unfreeze"]  # of 1 and of 2 samples


def test_a_trial_is_at_most_12_calls_from_the_callback() -> None:
    """Of our own functions, between Lightning's call of `on_fit_start` and its call of the user's `training_step`."""
    folder = str(Path(batchfinder.__file__).parent)
    calls: list[list[str]] = []

    class Watching(nets.ConvNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            frame, names = sys._getframe(), []
            while frame is not None:
                if frame.f_code.co_filename.startswith(folder):
                    names.append(frame.f_code.co_qualname)
                frame = frame.f_back  # type: ignore[assignment]
            calls.append(names[::-1])
            return super().training_step(batch, batch_idx)

    nets.trainer(callbacks=[BatchFinder(max_batch_size=4, cache=False)], max_steps=1).fit(Watching())
    assert calls[0][0] == "BatchFinder.on_fit_start"
    assert len(calls[0]) <= 12, calls[0]
    assert calls[-1] == []  # training itself
