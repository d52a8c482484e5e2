"""`min_batch_size` and `multiple_of`: models that need two samples, or a multiple, are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from batchfinder.errors import InvalidValue
from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets
from tests.lightning.oom_net import MESSAGE


class Normed(nets.Module):
    """A BatchNorm1d, which needs two samples to train, and room for `most`."""

    def __init__(self, batch_size: int = 4, most: int = 20) -> None:
        super().__init__(batch_size)
        self.most = most
        self.error: type[Exception] = torch.OutOfMemoryError
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        self.sizes: list[int] = []

    def loss(self, batch: Any) -> torch.Tensor:
        pictures, labels = batch
        if len(pictures) > self.most:
            raise self.error(MESSAGE)
        self.sizes.append(len(pictures))
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def train_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(64, 4), batch_size=self.batch_size)


class Pairs(Normed):
    """Its loss takes samples in groups of four."""

    def loss(self, batch: Any) -> torch.Tensor:
        groups = self.net(batch[0]).view(-1, 4, 10)
        return super().loss(batch) + (groups[:, 0] - groups[:, 1]).pow(2).mean()


def test_a_batch_norm_is_searched_from_two() -> None:
    """No size below is tried."""
    finder, module = BatchFinder(min_batch_size=2, tolerance=0, cache=False), Normed()
    nets.trainer(callbacks=[finder]).fit(module)
    assert finder.batch_size == 20
    assert min(trial.batch_size for trial in finder.results["fit"][None].trials) == 2
    assert module.sizes == [20, 20, 20, 4]


def test_without_a_minimum_the_search_goes_on_from_two(caplog: pytest.LogCaptureFixture) -> None:
    """One sample raises in BatchNorm1d and two run; the summary says so, and the fit trains."""
    finder, module = BatchFinder(tolerance=0, cache=False), Normed()
    with caplog.at_level("INFO"):
        nets.trainer(callbacks=[finder]).fit(module)
    assert finder.batch_size == 20
    assert module.sizes == [20, 20, 20, 4]
    (line,) = [line for line in caplog.messages if line.startswith("BatchFinder: fit batch size 20")]
    assert "; from 2 on, since batch size 1 raised ValueError: Expected more than 1 value per channel" in line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError, "and the step caught the error and went on"),
        (RuntimeError, "no optimizer stepped, as they do at other sizes"),  # as of a library with memory of its own
    ],
)
def test_a_step_that_catches_an_out_of_memory_does_not_fit(error: type[Exception], words: str) -> None:
    """It returns None, and Lightning steps the optimizer without gradients: nothing was trained."""

    class Catches(Normed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            try:
                return super().training_step(batch, batch_idx)
            except RuntimeError:
                return None

    finder = BatchFinder(min_batch_size=2, tolerance=0, cache=False)
    module = Catches()
    module.error = error
    nets.trainer(callbacks=[finder]).fit(module)
    assert finder.batch_size == 20
    failed = [trial.measurement.message for trial in finder.results["fit"][None].trials if not trial.fits]
    assert failed
    assert all(words in message for message in failed)


def test_a_cached_size_at_which_a_step_catches_an_out_of_memory_does_not_fit(tmp_path: Path) -> None:
    """Its one trial is the first of the start: a smaller one says whether the optimizer steps at all."""

    class Catches(Normed):
        limit = 20

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > type(self).limit:
                return None
            return super().training_step(batch, batch_idx)

    for limit in (20, 14):
        Catches.limit = limit
        finder = BatchFinder(min_batch_size=2, tolerance=0, cache=str(tmp_path))
        nets.trainer(callbacks=[finder]).fit(Catches())
        assert finder.batch_size == limit


def test_a_multiple_is_kept_by_every_trial_and_by_the_plan() -> None:
    """The largest that fits is 20, a multiple of 4 makes up a target of 32 as 16 x 2."""
    finder = BatchFinder(32, multiple_of=4, tolerance=0, cache=False)
    nets.trainer(callbacks=[finder]).fit(Pairs())
    assert all(trial.batch_size % 4 == 0 for trial in finder.results["fit"][None].trials)
    assert (finder.batch_size, str(finder.plan)) == (16, "16 x 2 = 32")


def test_a_certified_answer_keeps_them_and_another_minimum_is_another_question() -> None:
    """The second start looks it up; a search from four is its own."""
    sources = []
    for least in (2, 2, 4):
        finder = BatchFinder(min_batch_size=least)
        nets.trainer(callbacks=[finder]).fit(Normed())
        sources.append(finder.results["fit"][None].source)
    assert sources == ["measured", "cache", "measured"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_batch_size": 0}, "min_batch_size: invalid value 0; expected a size of at least 1."),
        ({"multiple_of": 0}, "multiple_of: invalid value 0; expected a size of at least 1."),
        (
            {"min_batch_size": 8, "max_batch_size": 4},
            "max_batch_size: invalid value 4; expected at least 8, the smallest size that is at least 8.",
        ),
        (
            {"target_batch_size": 30, "multiple_of": 4},
            "target_batch_size: invalid value 30; expected a multiple of 4, as multiple_of asks of each size.",
        ),
        (
            {"split_batches": True, "multiple_of": 4},
            "multiple_of: invalid value 4; expected 1 with split_batches=, where a batch's last micro-batch is what is "
            "left of it.",
        ),
    ],
)
def test_limits_that_leave_no_size_are_refused_when_the_callback_is_made(
    arguments: dict[str, Any], message: str
) -> None:
    """With the argument and what it may be."""
    with pytest.raises(InvalidValue) as caught:
        BatchFinder(**arguments)
    assert str(caught.value) == message


def test_data_that_are_fewer_than_the_smallest_batch_are_refused() -> None:
    """The number of samples is named; nothing is tried."""
    finder = BatchFinder(min_batch_size=65, cache=False)
    with pytest.raises(InvalidValue, match="expected at most 64, the samples of an epoch on one device"):
        nets.trainer(callbacks=[finder]).fit(Normed())
    assert finder.results == {}


def test_a_validation_of_fewer_samples_is_one_batch() -> None:
    """What is asked of training's batches does not stop a fit whose validation has less data."""

    class Validates(Normed):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

        def val_dataloader(self) -> Any:
            return DataLoader(nets.Pictures(3, 4), batch_size=1)

    finder = BatchFinder(min_batch_size=8, also="validate", cache=False)
    nets.trainer(callbacks=[finder]).fit(Validates())
    assert (finder.batch_size, finder.results["validate"][None].max_batch_size) == (20, 8)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"limit_train_batches": 0.1}, 6),  # ten batches of 64 samples, of which one is taken
        ({"overfit_batches": 0.25}, 16),
        ({"val_check_interval": 10}, 6),
        ({"limit_train_batches": 3}, 20),
        ({}, 20),
    ],
)
def test_an_epoch_keeps_the_batches_that_the_trainer_asks_for(settings: dict[str, Any], expected: int) -> None:
    """With a larger size the fit itself would end with Lightning's error."""
    finder = BatchFinder(min_batch_size=2, tolerance=0, cache=False)
    nets.trainer(callbacks=[finder], **settings).fit(Normed())
    assert finder.batch_size == expected


def test_a_minimum_that_leaves_too_few_batches_is_refused() -> None:
    """Before anything is tried, with what asks for them."""
    finder = BatchFinder(min_batch_size=8, cache=False)
    with pytest.raises(InvalidValue, match=r"at most 6, the samples .* limit_train_batches"):
        nets.trainer(callbacks=[finder], limit_train_batches=0.1).fit(Normed())


def test_code_finds_its_loggers_and_their_folders_in_a_trial(tmp_path: Path) -> None:
    """There are as many, and they say where they log; what is logged to them in a trial is not."""

    class Logs(Normed):
        folders: set[str]

        def on_train_start(self) -> None:
            self.folders.add(self.logger.log_dir)
            self.loggers[1].log_metrics({"seen": 1.0})

    module = Logs()
    module.folders = set()
    loggers = [CSVLogger(str(tmp_path), name="runs", version=each) for each in ("first", "second")]
    finder = BatchFinder(min_batch_size=2, max_batch_size=8, cache=False)
    nets.trainer(callbacks=[finder], logger=loggers).fit(module)
    assert module.folders == {str(tmp_path / "runs" / "first")}
    assert finder.batch_size == 8


@pytest.mark.parametrize("asks", ["the module", "the datamodule", "the trainer"])
def test_a_scheduler_is_as_long_as_the_new_epoch(asks: str) -> None:
    """However `configure_optimizers` asks how many batches there are."""

    class Data(pl.LightningDataModule):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return DataLoader(nets.Pictures(64, 4), batch_size=self.batch_size)

    class Scheduled(Normed):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            owner = self if asks == "the module" else self.trainer.datamodule
            steps = self.trainer.estimated_stepping_batches if asks == "the trainer" else len(owner.train_dataloader())
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module, data = Scheduled(), Data() if asks == "the datamodule" else None
    trainer = nets.trainer(callbacks=[finder := BatchFinder(min_batch_size=2, tolerance=0, cache=False)])
    trainer.fit(module, datamodule=data)
    assert finder.batch_size == 20
    assert trainer.lr_scheduler_configs[0].scheduler.total_steps == 4
    assert "train_dataloader" not in vars(module)


def test_code_finds_its_loader_in_a_trial() -> None:
    """Its dataset, its sampler and its workers; what it lacks is an error with a note on the trial."""

    class Asks(Normed):
        def on_train_epoch_start(self) -> None:
            loader = self.trainer.train_dataloader
            assert (len(loader.dataset), loader.num_workers) == (64, 0)
            assert isinstance(loader.sampler, torch.utils.data.SequentialSampler)

    finder = BatchFinder(min_batch_size=2, max_batch_size=8, cache=False)
    nets.trainer(callbacks=[finder]).fit(Asks())
    assert finder.batch_size == 8

    class Lacks(Normed):
        def on_train_epoch_start(self) -> None:
            self.trainer.train_dataloader.nothing_of_the_kind

    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'nothing_of_the_kind'") as caught:
        nets.trainer(callbacks=[BatchFinder(min_batch_size=2, cache=False)]).fit(Lacks())
    (note,) = caught.value.__notes__
    assert "BatchFinder tried batch size 2, where the trainer's loaders and loggers are stand-ins" in note
