"""A trainer of `lightning.pytorch` is served like one of `pytorch_lightning`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.profilers import PassThroughProfiler
from torch.utils.data import DataLoader, TensorDataset

from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.compat import is_a, is_lightnings_own, package_of, twin


def test_the_package_of_a_trainer() -> None:
    """Its class tells, or the class it is derived from."""

    class Mine(pytorch_lightning.Trainer):
        """A user's own trainer."""

    base = type("Trainer", (), {"__module__": "lightning.pytorch.trainer.trainer"})
    theirs = type("Mine", (base,), {"__module__": "user"})()
    assert [package_of(trainer) for trainer in (Mine(logger=False), theirs)] == [
        "pytorch_lightning",
        "lightning.pytorch",
    ]
    assert twin(Mine(logger=False), "profilers", "PassThroughProfiler") is PassThroughProfiler


def test_classes_are_recognised_by_their_names_and_packages() -> None:
    """In either package; a user's class of the same name is another."""
    early = pytorch_lightning.callbacks.EarlyStopping("loss")
    other = type("EarlyStopping", (), {"__module__": "lightning.pytorch.callbacks.early_stopping"})()
    mine = type("EarlyStopping", (), {"__module__": "user"})()
    derived = type("Mine", (type(early),), {"__module__": "user"})("loss")
    assert [is_a(thing, "EarlyStopping") for thing in (early, other, mine, derived)] == [True, True, False, True]
    assert [is_lightnings_own(thing) for thing in (early, other, mine, derived)] == [True, True, False, False]


@pytest.fixture(scope="module")
def pl() -> ModuleType:
    """The twin, where it is installed."""
    module: ModuleType = pytest.importorskip("lightning.pytorch")
    return module


def make(pl: ModuleType, batch_size: int) -> Any:
    """A module of the twin, with dropout, that validates."""

    class Net(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = batch_size
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rows = batch[0][0] if isinstance(batch[0], list) else batch[0]  # several loaders make a list of batches
            loss: torch.Tensor = self.net(rows).pow(2).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation", self.training_step(batch, batch_idx))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return loader(self.batch_size)

        val_dataloader = train_dataloader

    return Net()


def loader(batch_size: int) -> Any:
    """Shuffled rows."""
    return DataLoader(TensorDataset(torch.arange(128.0).view(32, 4) / 128), batch_size=batch_size, shuffle=True)


def fit(pl: ModuleType, batch_size: int, callbacks: list[Any], folder: Path, feed: Any = None, **options: Any) -> Any:
    """Train from one seed, with a logger and an early stop; the module and the trainer."""
    pl.seed_everything(1, verbose=False)
    module = make(pl, batch_size)
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, pl.callbacks.EarlyStopping("validation", patience=5)],
        logger=pl.loggers.CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        **options,
    )
    trainer.fit(module, feed)
    return module, trainer


@pytest.mark.parametrize("how", ["hook", "loader", "combined", "list"])
def test_a_fit_of_the_twin_is_bit_identical(how: str, pl: ModuleType, tmp_path: Path) -> None:
    """Found, set, accumulated, and not a trace left; a second start looks it up."""

    def feed(batch_size: int) -> Any:
        if how == "hook":
            return None
        if how == "combined":
            combined: Any = pl.utilities.combined_loader.CombinedLoader([loader(batch_size)], "min_size")
            return combined
        return [loader(batch_size)] if how == "list" else loader(batch_size)

    finder, again = (BatchFinder(16, max_batch_size=8, also=["validate"]) for _ in range(2))
    found, trainer = fit(pl, 2, [finder], tmp_path, feed(2))
    fit(pl, 2, [again], tmp_path, feed(2))
    direct, _ = fit(pl, 8, [], tmp_path, feed(8), accumulate_grad_batches=2)
    assert (finder.batch_size, trainer.global_step) == (8, 4)
    assert [outcome.source for stage in again.outcomes.values() for outcome in stage.values()] == ["cache", "cache"]
    for one, other in zip(found.parameters(), direct.parameters(), strict=True):
        assert torch.equal(one, other)
