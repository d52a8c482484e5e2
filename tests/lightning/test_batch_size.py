"""The size is set wherever loaders come from, stays set, and comes off again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from batchfinder.errors import InvalidValue
from batchfinder.lightning.batch_size import Applied, apply_batch_size, check_loaders
from batchfinder.lightning.callback import BatchFinder
from tests.lightning.tiny import Hooked, Rows, Stream, Tiny, same, trainer


class Setting(pl.Callback):
    """Applies a size at the moment at which BatchFinder does."""

    def __init__(self, batch_size: int, stage: str = "fit", attribute: str = "batch_size") -> None:
        self.batch_size, self.stage, self.attribute = batch_size, stage, attribute
        self.applied = Applied()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.applied = apply_batch_size(trainer, pl_module, self.stage, self.batch_size, self.attribute)


def fit(module: Any, *loaders: Any, batch_size: int | None = None, datamodule: Any = None, **settings: Any) -> Applied:
    """One seeded run; what was applied."""
    callback = Setting(batch_size or 1)
    pl.seed_everything(7, verbose=False)
    callbacks = [] if batch_size is None else [callback]
    trainer(callbacks=callbacks, **settings).fit(module, *loaders, datamodule=datamodule)
    return callback.applied


class HparamsOnly(Tiny):
    """Knows its batch size as a hyperparameter."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(22), batch_size=self.hparams.batch_size, shuffle=True)


class Configured(Tiny):
    """Knows its batch size deep in a configuration: a namespace that holds a dict, also among its hyperparameters."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(22), batch_size=self.cfg.data["batch_size"] // 2)


class Data(pl.LightningDataModule):
    """Knows its batch size twice, and makes a loader of half of it."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(22), batch_size=self.batch_size // 2)


def test_module_attribute():
    """An attribute that the module's hook reads is set, and training is what it is with the attribute written there."""
    module, written = Hooked(), Hooked()
    applied = fit(module, batch_size=5)
    written.batch_size = 5
    fit(written)
    assert same(module.seen, written.seen)
    assert applied == ["Hooked.batch_size: 2 -> 5"]
    applied.undo()
    assert module.batch_size == 2


def test_undo_leaves_a_size_that_was_set_since():
    """It is somebody else's."""
    module = Hooked()
    applied = fit(module, batch_size=5)
    module.batch_size = 7
    applied.undo()
    assert module.batch_size == 7


def test_hparams():
    """A hyperparameter is set where it is kept, and put back."""
    module = HparamsOnly()
    applied = fit(module, batch_size=5)
    assert [len(batch) for batch in module.seen] == [5, 5, 5, 5, 2]
    assert applied == ["hparams.batch_size: 2 -> 5"]
    assert module.hparams.batch_size == 5
    applied.undo()
    assert module.hparams.batch_size == 2


@pytest.mark.parametrize("own", [2, None])
def test_a_name_with_dots(own):
    """It is followed through attributes and keys; the hook sees the size, and the old one comes back."""
    module = Configured(SimpleNamespace(data={"batch_size": own, "rows": 22}))
    callback = Setting(5, attribute="cfg.data.batch_size")
    trainer(callbacks=[callback]).fit(module)
    assert [len(batch) for batch in module.seen] == [5, 5, 5, 5, 2]
    assert callback.applied[0] == f"cfg.data.batch_size: {own} -> 5"
    assert module.cfg.data["batch_size"] == 5
    callback.applied.undo()
    assert module.cfg.data == {"batch_size": own, "rows": 22}


@pytest.mark.parametrize("name", ["cfg.batch_size", "cfg.data.rows.batch_size", "data.batch_size"])
def test_a_name_with_dots_that_leads_nowhere_sets_nothing(name):
    """The loaders have the size all the same."""
    module = Configured(SimpleNamespace(data={"batch_size": 2, "rows": 22}))
    callback = Setting(5, attribute=name)
    trainer(callbacks=[callback]).fit(module)
    assert [len(batch) for batch in module.seen] == [5, 5, 5, 5, 2]
    assert vars(module.cfg) == {"data": {"batch_size": 2, "rows": 22}}


def test_datamodule():
    """A datamodule's attribute and hyperparameter are set, and its loader has the size whatever it computed."""
    module, data = Tiny(), Data()
    applied = fit(module, batch_size=5, datamodule=data)
    assert [len(batch) for batch in module.seen] == [5, 5, 5, 5, 2]
    assert applied == ["Data.batch_size: 4 -> 5", "hparams.batch_size: 4 -> 5"]
    applied.undo()
    assert (data.batch_size, data.hparams.batch_size) == (4, 4)


def test_passed_to_fit():
    """A loader passed straight to fit() is changed itself, and put back."""
    module, loader = Tiny(), DataLoader(Rows(22), batch_size=2, shuffle=True)
    made = Tiny()
    applied = fit(module, loader, batch_size=5)
    fit(made, DataLoader(Rows(22), batch_size=5, shuffle=True))
    assert same(module.seen, made.seen)
    assert applied == ["batch size of the DataLoader passed to fit(): 2 -> 5"]
    applied.undo()
    applied.undo()
    assert (loader.batch_size, loader.batch_sampler.batch_size) == (2, 2)


class NoAttribute(Tiny):
    """Makes a loader of a size that is written into the hook, each epoch again."""

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(22), batch_size=3)


def test_reloaded_every_epoch():
    """Loaders made by a hook anew each epoch have the size each time, though nothing tells the hook about it."""
    module = NoAttribute()
    applied = fit(module, batch_size=10, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert [len(batch) for batch in module.seen] == [10, 10, 2] * 3
    assert applied == []


@pytest.mark.parametrize("wrap", [list, tuple, lambda two: {"a": two[0], "b": two[1]}, CombinedLoader])
def test_several_loaders(wrap):
    """Each of several loaders gets the size, in whatever they come."""
    loaders = wrap([DataLoader(Rows(22), batch_size=2), DataLoader(Stream(22), batch_size=7)])
    module = Tiny()
    seen = []
    module.training_step = lambda batch, batch_idx: seen.append(batch)  # type: ignore[method-assign]
    applied = fit(module, loaders, batch_size=11)
    sizes = {len(tensor) for batch in seen for tensor in (batch.values() if isinstance(batch, dict) else batch)}
    assert sizes == {11}
    assert applied == [
        "batch size of the DataLoader passed to fit(): 2 -> 11",
        "batch size of the DataLoader passed to fit(): 7 -> 11",
    ]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages(stage):
    """The other stages' loaders get a size of their own; the attribute, which training reads, stays."""
    module = Hooked()
    runner = trainer()
    module.trainer = runner
    applied = apply_batch_size(runner, module, stage, 11)
    getattr(runner, stage)(module)
    assert [len(batch) for batch in module.seen] == [11, 11]
    assert module.batch_size == 2
    applied.undo()
    module.seen.clear()
    getattr(runner, stage)(module)
    assert {len(batch) for batch in module.seen} == {2}


def test_validation_within_fit():
    """The size for validation holds in the validation that a fit runs, and leaves training's alone."""
    module = Hooked()
    pl.seed_everything(7, verbose=False)
    trainer(callbacks=[Setting(11, "validate")]).fit(module)
    assert [len(batch) for batch in module.seen] == [11, 11] + [2] * 11 + [11, 11]


def test_next_fit_of_the_same_trainer():
    """After undo the same trainer takes the next run's loaders as they are."""
    runner = trainer()
    first, second = Tiny(), Tiny()
    runner.fit(first, DataLoader(Rows(6), batch_size=2))
    applied = apply_batch_size(runner, first, "fit", 3)
    source = runner.fit_loop._data_source
    applied.undo()
    assert "dataloader" not in vars(source)
    runner.fit_loop.epoch_progress.reset()
    runner.fit(second, DataLoader(Rows(6), batch_size=2))
    assert [len(batch) for batch in second.seen] == [2, 2, 2]
    source.instance = loader = DataLoader(Rows(6), batch_size=2)
    assert source.dataloader() is loader
    assert loader.batch_size == 2


class AsksForSteps(Hooked):
    """Has its loaders asked for before training starts."""

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_loaders_already_requested():
    """Loaders that were asked for in configure_optimizers are asked for again, at the new size."""
    module = AsksForSteps()
    fit(module, batch_size=11, max_epochs=2, limit_val_batches=0)
    assert module.steps == 22
    assert [len(batch) for batch in module.seen] == [11] * 4


class OwnBatches(Tiny):
    """Makes batches of its own attribute's size, in a way that nobody can see into."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader([torch.ones(self.batch_size, 2, dtype=torch.float64)] * 2, batch_size=None)


def test_attribute_is_trusted():
    """A hook with the attribute is trusted to use it for batches that it makes itself; without it they are refused."""
    module = OwnBatches()
    fit(module, batch_size=5)
    assert [len(batch) for batch in module.seen] == [5, 5]
    with pytest.raises(MisconfigurationException, match=r"the DataLoader that NoSize\.train_dataloader\(\) returned"):
        fit(NoSize(), batch_size=5)


class NoSize(OwnBatches):
    """The same, with an attribute that is no size."""

    batch_size = "auto"

    def train_dataloader(self) -> Any:
        return DataLoader([torch.ones(2, 2, dtype=torch.float64)] * 2, batch_size=None)


def test_refused_before_a_search():
    """What could not be given a size is refused before the search, by the same rule."""
    module, runner = OwnBatches(), trainer()
    module.trainer = runner
    runner.fit_loop._data_source.instance = module
    loaders = module.train_dataloader()
    source = runner.fit_loop._data_source
    check_loaders(source, loaders, "fit", module, "batch_size")
    check_loaders(source, DataLoader(Rows(2)), "fit", module, "rows")
    with pytest.raises(MisconfigurationException) as caught:
        check_loaders(source, loaders, "fit", module, "rows")
    assert str(caught.value) == (
        "batchfinder cannot change the batch size of the DataLoader that OwnBatches.train_dataloader() returned: its"
        " batches are made by a list, which has no integer attribute `batch_size`. Give it one that it reads each time"
        " it is iterated, or make the loader in `train_dataloader()` with the size that the attribute `batch_size` of"
        " your module or datamodule holds."
    )


def test_refused_leaves_nothing_set():
    """When one of several loaders is refused, those before it and the attribute are as they were."""
    module, loader = Hooked(), DataLoader(Rows(6), batch_size=2)
    with pytest.raises(MisconfigurationException, match="are made by a Stream"):
        fit(module, {"a": loader, "b": DataLoader(Stream(6), batch_size=None)}, batch_size=3)
    assert (module.batch_size, loader.batch_size, loader.batch_sampler.batch_size) == (2, 2, 2)


def test_wrong_arguments():
    """A stage that does not exist and a size of 0 are refused."""
    with pytest.raises(InvalidValue) as caught:
        apply_batch_size(trainer(), Tiny(), "tune", 4)
    assert str(caught.value) == "stage: invalid value 'tune'; expected one of fit, validate, test, predict."
    with pytest.raises(InvalidValue) as caught:
        apply_batch_size(trainer(), Tiny(), "fit", 0)
    assert str(caught.value) == "batch_size: invalid value 0; expected a size of at least 1."


class Recurrent(Tiny):
    """Its step relies on its own batch size, as a hidden state of fixed shape does."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(batch_size=batch_size)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = torch.ones(self.cfg.batch_size, 1, dtype=torch.float64)
        self.seen.append(batch)
        return (self.layer(batch) * hidden).pow(2).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(20), batch_size=self.cfg.batch_size, drop_last=True)


def test_the_attribute_is_the_size_while_it_is_tried():
    """A step that relies on it runs at each size; where nothing is found it is what it was."""
    module = Recurrent()
    finder = BatchFinder(max_batch_size=5, batch_size_attribute="cfg.batch_size", cache=False)
    trainer(callbacks=[finder]).fit(module)
    assert (finder.batch_size, module.cfg.batch_size, len(module.seen)) == (5, 5, 4)
    module = Recurrent(3)
    module.layer = torch.nn.Linear(3, 1)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trainer(callbacks=[finder]).fit(module)
    assert module.cfg.batch_size == 3
