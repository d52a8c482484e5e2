"""What the tests of Lightning's own batch size finder ask of it, asked of BatchFinder where it means the same.

After `tests/tests_pytorch/tuner/test_scale_batch_size.py` of Lightning 2.6 and the tests of callbacks that name its
finder. `docs/lightning.md` lists what is meant otherwise: what their finder refuses (loaders that were passed in,
several loaders, DDP) is served here, and there is nothing here like its modes, trials and margin.
"""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from batchfinder.errors import InvalidValue
from batchfinder.lightning.callback import BatchFinder

STAGES = ("fit", "validate", "test", "predict")


def loader(batch_size: int | None, rows: int = 64) -> Any:
    """Random rows."""
    return DataLoader(RandomDataset(32, rows), batch_size=batch_size or 1)


class Model(BoringModel):
    """Makes loaders of 64 rows with its batch size; of one row where it has none."""

    def __init__(self, batch_size: int | None = 2, rows: int = 64) -> None:
        super().__init__()
        self.rows = rows
        if batch_size is not None:
            self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(getattr(self, "batch_size", None), self.rows)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class HparamsModel(BoringModel):
    """Has its batch size as a hyperparameter alone."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(self.hparams["batch_size"])

    val_dataloader = train_dataloader


class Data(pl.LightningDataModule):
    """Makes loaders of 64 rows with its batch size."""

    def __init__(self, batch_size: int | None = 2) -> None:
        super().__init__()
        if batch_size is not None:
            self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(getattr(self, "batch_size", None))


class HparamsData(pl.LightningDataModule):
    """Has its batch size as a hyperparameter alone."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(self.hparams["batch_size"])


class Limited(Model):
    """Runs out of memory where its batch size, by its own attribute, is above 100."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.batch_size > 100:
            raise RuntimeError("CUDA error: out of memory")
        return super().training_step(batch, batch_idx)


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """One on the CPU that writes into a folder."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    where = {"default_root_dir": folder, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(**{**where, **quiet, "callbacks": list(callbacks), **options})


def left_behind(folder: Path) -> list[str]:
    """Files of a search, of which there are to be none."""
    return [name for name in os.listdir(folder) if name.startswith(".") or "scale" in name]


@pytest.mark.parametrize(("of_model", "of_data"), [(2, -1), (2, 2), (2, None), (None, 2), (16, 16)])
def test_the_size_is_set_in_the_model_and_the_datamodule(
    of_model: int | None, of_data: int | None, tmp_path: Path
) -> None:
    """Wherever there is one, and in the loader; -1 for no datamodule."""
    model, data = Model(of_model), None if of_data == -1 else Data(of_data)
    runner = trainer(tmp_path, BatchFinder(max_batch_size=8, cache=False), limit_train_batches=1, limit_val_batches=0)
    runner.fit(model, datamodule=data)
    assert getattr(model, "batch_size", 8) == 8
    assert getattr(data, "batch_size", 8) == 8
    assert runner.train_dataloader.batch_size == 8  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", STAGES)
def test_the_trainer_and_the_model_are_reset(stage: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """After a search without training."""
    model, runner = Model(), trainer(tmp_path)
    names = ("loggers", "callbacks", "global_step", "max_steps", *(f"limit_{part}_batches" for part in LIMITED))
    before = {name: getattr(runner, name) for name in names}
    loops, weights = deepcopy(runner.fit_loop.state_dict()), deepcopy(model.state_dict())
    assert BatchFinder(max_batch_size=64, cache=False).find(runner, model, stage=stage) == 64
    assert {name: getattr(runner, name) for name in names} == before
    assert runner.fit_loop.state_dict() == loops
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert left_behind(tmp_path) == []
    assert not [one for one in recwarn if "Please add the following callbacks" in str(one.message)]


LIMITED = ("train", "val", "test", "predict")


@pytest.mark.parametrize("in_hparams", [True, False])
def test_the_size_is_written_to_the_models_attribute(in_hparams: bool, tmp_path: Path) -> None:
    """Its own, or its hyperparameter."""
    model = HparamsModel() if in_hparams else Model()
    runner = trainer(tmp_path, BatchFinder(max_batch_size=32, cache=False))
    runner.fit(model)
    after = model.hparams["batch_size"] if in_hparams else model.batch_size
    assert 2 < after <= len(runner.train_dataloader.dataset)  # type: ignore[union-attr]


@pytest.mark.parametrize("in_hparams", [True, False])
def test_the_size_is_written_to_the_datamodules_attribute(in_hparams: bool, tmp_path: Path) -> None:
    """Its own, or its hyperparameter."""
    data: Any = HparamsData() if in_hparams else Data()
    runner = trainer(tmp_path, BatchFinder(max_batch_size=32, cache=False))
    runner.fit(Model(), datamodule=data)
    assert runner.datamodule is data  # type: ignore[attr-defined]
    after = data.hparams["batch_size"] if in_hparams else data.batch_size
    assert 2 < after <= len(runner.train_dataloader.dataset)  # type: ignore[union-attr]


def test_an_attribute_and_a_hyperparameter_of_one_name_are_both_set(tmp_path: Path) -> None:
    """Lightning's finder warns that they are mutually exclusive; here both have the size."""

    class Twice(HparamsModel):
        def __init__(self, batch_size: int = 1) -> None:
            super().__init__(batch_size)
            self.batch_size = 1

    model = Twice()
    trainer(tmp_path, BatchFinder(max_batch_size=4, cache=False), max_steps=1).fit(model)
    assert (model.batch_size, model.hparams["batch_size"]) == (4, 4)


def test_a_search_and_then_a_fit_with_its_size(tmp_path: Path) -> None:
    """The size is returned, to be set by hand."""
    model, runner = Model(), trainer(tmp_path)
    found = BatchFinder(max_batch_size=32, cache=False).find(runner, model)
    assert found == 32
    model.batch_size = found
    runner.fit(model)
    assert runner.global_step == 2


def test_a_loader_passed_to_fit_is_served(tmp_path: Path) -> None:
    """Lightning's finder refuses it."""
    model, passed = Model(), loader(2)
    runner = trainer(tmp_path, BatchFinder(max_batch_size=16, cache=False), limit_val_batches=0.5)
    runner.fit(model, passed)
    assert (passed.batch_size, model.batch_size, runner.global_step) == (16, 16, 4)


def test_mixed_precision(tmp_path: Path) -> None:
    """Lightning's test is on a GPU with 16-mixed; see test_gpu.py for that."""
    model = Model()
    trainer(tmp_path, BatchFinder(max_batch_size=16, cache=False), max_steps=1, precision="bf16-mixed").fit(model)
    assert model.batch_size == 16


def test_nothing_to_search(tmp_path: Path) -> None:
    """Where the cap is the size that the loader has, it is kept; Lightning's test asks for no trials."""
    finder = BatchFinder(min_batch_size=2, max_batch_size=2, cache=False)
    assert finder.find(trainer(tmp_path), Model(2)) == 2


@pytest.mark.parametrize("own", [8, 17, 64])
def test_loaders_of_training_and_validation_have_the_size(own: int, tmp_path: Path) -> None:
    """No size above the rows of the data is tried."""
    finder = BatchFinder(max_batch_size=2 * own, also="validate", cache=False)
    runner = trainer(tmp_path, finder)
    runner.fit(Model(16))
    size = min(2 * own, 64)
    assert (runner.train_dataloader.batch_size, runner.val_dataloaders.batch_size) == (size, size)  # type: ignore[union-attr]
    assert max(trial.batch_size for trial in finder.results["fit"][None].trials) <= 64


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_search_for_an_evaluation(stage: str, tmp_path: Path) -> None:
    """No batch of the evaluation itself is run."""
    model, runner = Model(), trainer(tmp_path, max_epochs=100)
    assert BatchFinder(max_batch_size=16, cache=False).find(runner, model, stage=stage) == 16
    loop = getattr(runner, f"{stage}_loop")
    assert (runner.global_step, runner.current_epoch, loop.batch_progress.current.completed) == (0, 0, 0)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("stage", STAGES)
def test_the_callback_in_each_of_the_trainers_methods(stage: str, tmp_path: Path) -> None:
    """As many steps as batches of the size; the attribute is the size of training, and of nothing else."""
    finder = BatchFinder(max_batch_size=16, also=() if stage == "fit" else stage, cache=False)
    model, runner = Model(), trainer(tmp_path, finder, max_epochs=2)
    getattr(runner, stage)(model)
    loop = getattr(runner, f"{stage}_loop")
    assert model.batch_size == (16 if stage == "fit" else 2)
    assert left_behind(tmp_path) == []
    if stage == "fit":
        assert (runner.global_step, runner.current_epoch) == (8, 2)
        assert loop.epoch_loop.batch_progress.total.completed == 8
    else:
        assert (runner.global_step, runner.current_epoch) == (0, 0)
        assert loop.batch_progress.current.completed == 4


def test_an_invalid_stage(tmp_path: Path) -> None:
    """It is named with those that there are."""
    with pytest.raises(InvalidValue) as caught:
        BatchFinder().find(trainer(tmp_path), BoringModel(), stage="prediction")
    assert str(caught.value) == "stage: invalid value 'prediction'; expected one of fit, validate, test, predict."


def test_loaders_of_another_stage_are_refused(tmp_path: Path) -> None:
    """They would be ignored."""
    model = BoringModel()
    with pytest.raises(InvalidValue, match="expected dataloaders= for validate; these are of a fit's validation"):
        BatchFinder().find(trainer(tmp_path), model, val_dataloaders=model.val_dataloader(), stage="validate")


def test_several_loaders_of_an_evaluation_are_served(tmp_path: Path) -> None:
    """Lightning's finder refuses them; here each has the size, which is for the largest samples."""

    class Several(Model):
        def val_dataloader(self) -> Any:
            return [loader(2), DataLoader(RandomDataset(32, 48), batch_size=4)]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step(batch, batch_idx)

    runner = trainer(tmp_path, BatchFinder(max_batch_size=16, also="validate", cache=False))
    runner.validate(Several())
    assert [one.batch_size for one in runner.val_dataloaders] == [16, 16]  # type: ignore[union-attr]


def test_the_loader_has_the_answer_after_failures(tmp_path: Path) -> None:
    """The largest size that runs, exactly: Lightning's finder answers 62 or 95 where 100 runs."""
    finder, model = BatchFinder(tolerance=0, cache=False), Limited(16, rows=1000)
    model.validation_step = None  # type: ignore[method-assign, assignment]
    runner = trainer(tmp_path, finder, max_epochs=2)
    runner.fit(model)
    assert (finder.batch_size, model.batch_size, runner.train_dataloader.batch_size) == (100, 100, 100)  # type: ignore[union-attr]


def test_batches_of_validation_are_not_limited(tmp_path: Path) -> None:
    """A trial takes two steps; training's validation takes all of its batches."""
    runner = trainer(tmp_path, BatchFinder(max_batch_size=16, cache=False), num_sanity_val_steps=0)
    runner.fit(Model(16))
    assert runner.num_val_batches == [len(runner.val_dataloaders)] == [4]  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [1, 8, 33])
def test_a_cap_limits_the_size(cap: int, tmp_path: Path) -> None:
    """It is the answer where it fits."""
    assert BatchFinder(max_batch_size=cap, cache=False).find(trainer(tmp_path), Model()) == cap


def test_an_error_of_the_users_code_leaves_no_file(tmp_path: Path) -> None:
    """It is raised unchanged."""

    class Fails(Model):
        steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            if self.steps >= 2:
                raise RuntimeError("Intentional failure for testing cleanup")
            return super().training_step(batch, batch_idx)

    runner = trainer(tmp_path, BatchFinder(cache=False), enable_checkpointing=False, logger=False)
    with pytest.raises(RuntimeError, match=r"^Intentional failure for testing cleanup$"):
        runner.fit(Fails())
    assert [name for name in os.listdir(tmp_path) if name != "cache"] == []


def test_fast_dev_run_skips_the_search(tmp_path: Path) -> None:
    """With the callback in the trainer."""
    finder, model = BatchFinder(cache=False), Model()
    trainer(tmp_path, finder, fast_dev_run=True).fit(model)
    assert (finder.results, model.batch_size) == ({}, 2)


def test_the_callback_runs_before_the_learning_rate_finder_and_the_checkpoint(tmp_path: Path) -> None:
    """As Lightning orders its own: finders of sizes and rates first, checkpoints last."""
    finder, rates = BatchFinder(max_batch_size=4, cache=False), pl.callbacks.LearningRateFinder(num_training_steps=3)
    model = Model()
    model.lr = 0.1
    runner = trainer(tmp_path, pl.callbacks.ModelCheckpoint(tmp_path), rates, finder, max_steps=1)
    runner.fit(model)
    order = [type(callback).__name__ for callback in runner.callbacks]  # type: ignore[attr-defined]
    assert order.index("BatchFinder") < order.index("LearningRateFinder") < order.index("ModelCheckpoint")
