"""The sizes found are among the hyperparameters that a run's loggers are given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch.utils.data import DataLoader

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets


class Plain(nets.ConvNet):
    """Has no hyperparameters."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(batch_size, rows=32, side=4, width=4)


class Saves(Plain):
    """Has its batch size and its learning rate logged."""

    def __init__(self, batch_size: int = 2, lr: float = 0.1) -> None:
        super().__init__(batch_size)
        self.save_hyperparameters()


class Quiet(Saves):
    """Keeps its hyperparameters for itself."""

    def __init__(self, batch_size: int = 2) -> None:
        Plain.__init__(self, batch_size)
        self.save_hyperparameters(logger=False)


class Configured(Plain):
    """Has its batch size in a configuration."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(32, 4), batch_size=self.cfg["data"]["batch_size"])


class Data(pl.LightningDataModule):
    """Has the batch size logged as well."""

    def __init__(self, batch_size: int = 2, workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(32, 4), batch_size=self.hparams["batch_size"])


class Once(pl.loggers.CSVLogger):
    """Refuses a second value for a name, as MLflow does."""

    def log_hyperparams(self, params: Any = None) -> None:
        known = self.experiment.hparams
        assert all(known[name] == value for name, value in params.items() if name in known), (known, params)
        super().log_hyperparams(params)


def logged(folder: Path, module: pl.LightningModule, finder: BatchFinder, data: Any = None, **options: Any) -> Any:
    """What a logger has of one fit."""
    logger = Once(folder)
    nets.trainer(callbacks=[finder], logger=logger, **options).fit(module, datamodule=data)
    return yaml.unsafe_load(Path(logger.log_dir, "hparams.yaml").read_text())


@pytest.mark.parametrize("make", [Plain, Quiet])
def test_a_module_that_has_nothing_logged(make: Any, tmp_path: Path) -> None:
    """The batch size and what is accumulated stand alone."""
    finder = BatchFinder(16, max_batch_size=8, cache=False)
    assert logged(tmp_path, make(), finder) == {"batch_size": 8, "accumulate_grad_batches": 2}


def test_a_module_that_has_its_own_batch_size_logged(tmp_path: Path) -> None:
    """The size that trains is logged in place of the module's own, and once; the next run finds the own one again."""
    module, finder = Saves(), BatchFinder(max_batch_size=8, cache=False)
    assert logged(tmp_path, module, finder) == {"batch_size": 8, "lr": 0.1}
    nets.trainer(callbacks=[finder], fast_dev_run=True).fit(module)
    assert module.hparams_initial == {"batch_size": 2, "lr": 0.1}


def test_a_module_and_a_datamodule_that_have_theirs_logged(tmp_path: Path) -> None:
    """They agree, which Lightning insists on."""
    finder = BatchFinder(max_batch_size=8, cache=False)
    assert logged(tmp_path, Saves(), finder, Data()) == {"batch_size": 8, "lr": 0.1, "workers": 0}


def test_a_name_with_dots(tmp_path: Path) -> None:
    """The size stands where the configuration has it."""
    finder = BatchFinder(max_batch_size=8, cache=False, batch_size_attribute="cfg.data.batch_size")
    module = Configured({"data": {"batch_size": 2, "rows": 32}})
    assert logged(tmp_path, module, finder) == {"cfg": {"data": {"batch_size": 8, "rows": 32}}}


def test_split_batches(tmp_path: Path) -> None:
    """The whole batch's size, and the micro-batch's."""
    finder = BatchFinder(16, max_batch_size=4, split_batches=True, cache=False)
    assert logged(tmp_path, Plain(), finder) == {"batch_size": 16, "micro_batch_size": 4}


def test_a_trainer_that_logs_no_hyperparameters(tmp_path: Path) -> None:
    """It is given none."""
    pytest.importorskip("pytorch_lightning", minversion="2.6")
    logger = pl.loggers.CSVLogger(tmp_path)
    finder = BatchFinder(max_batch_size=8, cache=False)
    nets.trainer(callbacks=[finder], logger=logger, enable_autolog_hparams=False).fit(Saves())
    assert logger.experiment.hparams == {}


def test_namespaces_are_followed_too() -> None:
    """Hyperparameters may hold objects."""
    module = Configured({"data": {"batch_size": 2}})
    module.cfg = SimpleNamespace(data=SimpleNamespace(batch_size=2))
    module.train_dataloader = lambda: DataLoader(  # type: ignore[method-assign]
        nets.Pictures(32, 4), batch_size=module.cfg.data.batch_size
    )
    finder = BatchFinder(max_batch_size=8, cache=False, batch_size_attribute="cfg.data.batch_size")
    nets.trainer(callbacks=[finder]).fit(module)
    assert module.cfg.data.batch_size == 8
    assert torch.tensor(module.losses).shape == (4,)
