"""`BatchFinder.find`: a search that no training follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from batchfinder.errors import InvalidValue, OutOfMemory
from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.oom_net import MESSAGE


class Net(nets.ConvNet):
    """Has room for 20 samples, and evaluates."""

    def __init__(self, batch_size: int = 2, most: int = 20) -> None:
        super().__init__(batch_size, rows=32, side=4, width=4)
        self.most = most

    def loss(self, batch: Any) -> torch.Tensor:
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError(MESSAGE)
        return super().loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    test_step = predict_step = validation_step

    def val_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(32, 4), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader


class Hooks(pl.Callback):
    """Notes what of a run it sees."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_start(self, *args: Any) -> None:
        self.seen.append("train")

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append("batch")

    def on_validation_batch_start(self, *args: Any) -> None:
        self.seen.append("batch")

    def on_fit_end(self, *args: Any) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("own", [False, True], ids=["another's trainer", "its own trainer"])
def test_the_sizes_are_found_and_nothing_is_trained_or_left(own: bool, tmp_path: Path) -> None:
    """Weights, sizes, callbacks, random numbers and the trainer are what they were; no file is written."""
    finder, hooks, module = BatchFinder(64, tolerance=0), Hooks(), Net()
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = nets.trainer(callbacks=[hooks, *([finder] if own else [])], logger=logger, max_epochs=2)
    callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
    weights, random = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    assert finder.find(trainer, module) == 16
    assert (str(finder.plan), finder.results["fit"][None].max_batch_size) == ("16 x 4 = 64", 20)
    assert trainer.callbacks == callbacks  # type: ignore[attr-defined]
    assert (hooks.seen, module.batch_size, module.losses, trainer.accumulate_grad_batches) == ([], 2, [], 1)
    assert (trainer.global_step, trainer.current_epoch) == (0, 0)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert trainer.logger is logger


def test_a_fit_afterwards_is_the_one_that_no_search_came_before() -> None:
    """Bit for bit; with the callback the fit finds the answer in the cache."""
    losses = []
    for searches in (True, False):
        pl.seed_everything(3, verbose=False)
        module, trainer = Net(8), nets.trainer()
        if searches:
            assert BatchFinder(max_batch_size=8).find(trainer, module) == 8
        trainer.fit(module)
        losses.append(module.losses)
    assert losses[0] == losses[1] != []
    finder = BatchFinder(max_batch_size=8)
    nets.trainer(callbacks=[finder]).fit(Net())
    assert (finder.batch_size, finder.results["fit"][None].source) == (8, "cache")


def test_loaders_and_datamodules_as_in_fit() -> None:
    """A loader that was passed in has its own size back."""

    class Data(pl.LightningDataModule):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return DataLoader(nets.Pictures(10, 4), batch_size=self.batch_size)

    loader, data = DataLoader(nets.Pictures(12, 4), batch_size=4), Data()
    assert BatchFinder(cache=False).find(nets.trainer(), Net(), loader) == 12
    assert loader.batch_size == 4
    assert BatchFinder(cache=False).find(nets.trainer(), Net(), datamodule=data) == 10
    assert data.batch_size == 4


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation(stage: str) -> None:
    """Its size is found without `also`, and it does not run."""
    finder, hooks, trainer = BatchFinder(tolerance=0, cache=False), Hooks(), nets.trainer()
    trainer.callbacks.append(hooks)  # type: ignore[attr-defined]
    assert finder.find(trainer, Net(), stage=stage) == 20
    assert (list(finder.results), hooks.seen) == ([stage], [])
    assert getattr(nets.trainer(), stage)(Net()) is not None


def test_split_batches() -> None:
    """The sizes of micro-batches can be read, and the module's own loop is back."""
    finder = BatchFinder(16, split_batches=True, max_batch_size=4, cache=False)
    trainer = nets.trainer()
    assert finder.find(trainer, Net()) == 16
    assert finder.micro_batch_sizes == {None: 4}
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


def test_a_search_that_fails_leaves_the_trainer_as_it_was() -> None:
    """What is raised is what a fit would raise."""
    finder, trainer = BatchFinder(cache=False), nets.trainer()
    callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
    with pytest.raises(OutOfMemory, match="batch size 1 does not fit"):
        finder.find(trainer, Net(most=0))
    assert trainer.callbacks == callbacks  # type: ignore[attr-defined]
    trainer.fit(Net(4))
    assert trainer.global_step == 8


@pytest.mark.parametrize(
    ("options", "what"),
    [({"fast_dev_run": True}, "fast_dev_run"), ({"strategy": "ddp_spawn", "devices": 2}, "_MultiProcessingLauncher")],
)
def test_trainers_that_cannot_search_are_refused(options: dict[str, Any], what: str) -> None:
    """With what to do instead."""
    with pytest.raises(MisconfigurationException, match=what):
        BatchFinder().find(nets.trainer(**options), Net())
    with pytest.raises(InvalidValue, match="stage: invalid value 'tune'"):
        BatchFinder().find(nets.trainer(), Net(), stage="tune")
