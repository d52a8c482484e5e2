"""What a search leaves behind of itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.bounded import Bounded


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
