"""Where Lightning 2.6.6's BatchSizeFinder goes wrong: each beside its own result."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BatchSizeFinder

from batchfinder.errors import OutOfMemory
from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.oom_net import MESSAGE, Bounded
from tests.measure.messages import without_figures


class TriesForEver(Exception):
    """Stands for a search that does not end."""


class Snapshot(pl.Callback):
    """Comes after a finder: notes what it left, and ends the fit."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.random = torch.get_rng_state()
        self.seen = pl_module.seen.clone()
        self.steps_taken = pl_module.steps_taken
        trainer.should_stop = True


def lightnings(module: Bounded, tmp_path: Any, **options: Any) -> int | None:
    """The answer of Lightning's finder."""
    finder = BatchSizeFinder(steps_per_trial=3, **options)
    with suppress(torch.OutOfMemoryError):  # of training at its answer
        nets.trainer(callbacks=[finder, Snapshot()], default_root_dir=tmp_path).fit(module)
    return finder.optimal_batch_size


def ours(module: Bounded, **options: Any) -> tuple[int | None, set[int]]:
    """The answer, and the sizes that were tried and ran."""
    finder = BatchFinder(tolerance=0, cache=False, **options)
    nets.trainer(callbacks=[finder, Snapshot()]).fit(module)
    return finder.batch_size, {t.batch_size for o in finder.results["fit"].values() for t in o.trials if t.fits}


def test_1_a_cap_of_100(tmp_path: Any) -> None:
    """Lightning's power mode answers 128, beyond its cap, its binsearch an untried 100; ours is 100, and was tried."""

    class Watched(Bounded):
        tried: set[int]

        def loss(self, batch: Any) -> torch.Tensor:
            self.tried.add(len(batch[0]))
            return super().loss(batch)

    Watched.tried = set()
    assert lightnings(Watched(rows=1000), tmp_path, mode="power", max_val=100) == 128
    Watched.tried = set()
    assert lightnings(Watched(rows=1000), tmp_path, mode="binsearch", max_val=100, margin=0.0) == 100
    assert 100 not in Watched.tried
    answer, ran = ours(Bounded(rows=1000), max_batch_size=100)
    assert answer == 100
    assert 100 in ran


def test_2_a_hundred_rows_and_out_of_memory_above_70(tmp_path: Any) -> None:
    """Lightning's power mode answers a size that fails, its binsearch goes on for ever; ours is 70."""

    class Watched(Bounded):
        loaders = 0

        def train_dataloader(self) -> Any:
            Watched.loaders += 1
            if Watched.loaders > 20:
                raise TriesForEver
            return super().train_dataloader()

    assert lightnings(Watched(70, rows=100), tmp_path, mode="power") == 128
    Watched.loaders = 0
    with pytest.raises(TriesForEver):
        lightnings(Watched(70, rows=100), tmp_path, mode="binsearch", init_val=2, margin=0.0)
    answer, ran = ours(Bounded(70, rows=100))
    assert answer == 70
    assert 70 in ran


def test_3_not_even_one_sample_fits(tmp_path: Any) -> None:
    """Lightning's power mode fails on batch_size=0, its binsearch answers 1; ours says that one sample does not fit."""
    with pytest.raises(ValueError, match="batch_size"):
        lightnings(Bounded(0), tmp_path, mode="power")
    assert lightnings(Bounded(0), tmp_path, mode="binsearch", margin=0.0) == 1
    with pytest.raises(OutOfMemory) as caught:
        ours(Bounded(0))
    assert without_figures(str(caught.value)) == (
        f"batch size 1 does not fit: {MESSAGE} Try a smaller model, a lower precision, activation checkpointing or an "
        "optimizer with less state."
    )


def test_4_fewer_steps_in_an_epoch_than_a_try_needs(tmp_path: Any) -> None:
    """Where the second step needs more, Lightning takes 8 after the one step of an epoch of 8 rows; ours steps on."""
    assert lightnings(Bounded(rows=8, later=4), tmp_path, mode="power") == 8
    answer, ran = ours(Bounded(rows=8, later=4))
    assert answer == 4
    assert 4 in ran


def left_by(finder: pl.Callback, tmp_path: Any) -> tuple[Snapshot, torch.Tensor, Bounded]:
    """What a finder left, and the random numbers before it."""
    pl.seed_everything(1)
    module, snapshot = Bounded(70), Snapshot()
    before = torch.get_rng_state()
    nets.trainer(callbacks=[finder, snapshot], default_root_dir=tmp_path).fit(module)
    return snapshot, before, module


def test_5_random_numbers(tmp_path: Any) -> None:
    """Lightning leaves the random numbers where its tries took them; ours puts them back."""
    snapshot, before, _ = left_by(BatchSizeFinder(max_trials=3), tmp_path)
    assert not torch.equal(snapshot.random, before)
    snapshot, before, _ = left_by(BatchFinder(max_batch_size=8, cache=False), tmp_path)
    assert torch.equal(snapshot.random, before)


def test_6_buffers_that_are_not_saved(tmp_path: Any) -> None:
    """Lightning restores a checkpoint, which has no such buffers; ours puts them back."""
    assert left_by(BatchSizeFinder(max_trials=3), tmp_path)[0].seen.item() > 0
    assert left_by(BatchFinder(max_batch_size=8, cache=False), tmp_path)[0].seen.item() == 0


def test_7_counters_on_the_module(tmp_path: Any) -> None:
    """Lightning leaves Python attributes as its tries made them; ours puts them back."""
    assert left_by(BatchSizeFinder(max_trials=3), tmp_path)[0].steps_taken > 0
    assert left_by(BatchFinder(max_batch_size=8, cache=False), tmp_path)[0].steps_taken == 0
