"""Every private attribute that is used is there, in both packages, and trainers of either are served alike."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.profilers import PassThroughProfiler
from torch.utils.data import DataLoader, TensorDataset

from batchfinder.lightning import compat
from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.compat import class_for, is_a, is_lightnings_own, package_of

PACKAGES = [name for name in ("pytorch_lightning", "lightning.pytorch") if find_spec(name.partition(".")[0])]

LIGHTNING = {
    "callbacks.progress.rich_progress.RichProgressBar": ["_console_kwargs"],
    "callbacks.stochastic_weight_avg.StochasticWeightAveraging": ["_swa_epoch_start"],
    "core.mixins.hparams_mixin.HyperparametersMixin": ["_hparams_initial", "_log_hyperparams"],
    "core.module.LightningModule": ["_compiler_ctx", "_on_before_batch_transfer"],
    "loops.evaluation_loop._EvaluationLoop": ["_combined_loader", "_data_source", "_stage", "_trainer_fn"],
    "loops.fit_loop._FitLoop": ["_combined_loader", "_data_source"],
    "loops.optimization.automatic.Closure": ["_backward_fn", "_step_fn", "_zero_grad_fn"],
    "loops.optimization.automatic._AutomaticOptimization": ["_make_closure", "_make_step_fn", "output_result_cls"],
    "loops.prediction_loop._PredictionLoop": ["_combined_loader", "_data_source"],
    "loops.training_epoch_loop._TrainingEpochLoop": ["_build_kwargs"],
    "overrides.distributed._IndexBatchSamplerWrapper": ["_batch_sampler"],
    "strategies.ddp.DDPStrategy": ["_ddp_kwargs", "_timeout", "configure_ddp"],
    "strategies.launchers.multiprocessing._MultiProcessingLauncher": ["get_extra_results"],
    "trainer.connectors.checkpoint_connector._CheckpointConnector": ["_loaded_checkpoint", "restore_optimizers"],
    "trainer.connectors.data_connector._DataConnector": ["_requires_distributed_sampler"],
    "trainer.connectors.logger_connector.logger_connector._LoggerConnector": ["reset_metrics", "reset_results"],
    "trainer.connectors.logger_connector.result._ResultCollection": ["batch", "batch_size", "update_metrics"],
    "trainer.trainer.Trainer": [
        "_checkpoint_connector",
        "_data_connector",
        "_detect_anomaly",
        "_logger_connector",
        "_results",
        "_signal_connector",
    ],
    "utilities.combined_loader.CombinedLoader": ["_mode", "_spec"],
    "utilities.exceptions._TunerExitException": ["__init__"],
}
TORCH = {
    "torch.amp.GradScaler": ["_init_scale", "_scale"],
    "torch.distributed.Reducer": ["_rebuild_buckets"],
    "torch.nn.parallel.DistributedDataParallel": ["_check_sync_bufs_pre_fwd", "_has_rebuilt_buckets", "_sync_buffers"],
}


def has(path: str, name: str) -> bool:
    """Whether a class has an attribute, or sets it on its objects."""
    module, _, class_name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), class_name)
    if hasattr(cls, name):
        return True
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == path.partition(".")[0]]
    return any(re.search(rf"\bself\.{name}\b", inspect.getsource(base)) for base in bases)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_private_attribute_of_lightning_is_there(package: str) -> None:
    """The class and the name of one that is gone are named."""
    gone = [(path, name) for path, names in LIGHTNING.items() for name in names if not has(f"{package}.{path}", name)]
    assert gone == []


def test_every_private_attribute_of_ddp_is_there() -> None:
    """The class and the name of one that is gone are named."""
    assert [(path, name) for path, names in TORCH.items() for name in names if not has(path, name)] == []


def private_attributes(path: Path) -> set[str]:
    """Those that a module touches on objects other than its own, by name or through an `attrgetter`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        own = ("self", "cls", "torch")
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in own):
            names.add(node.attr)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "attrgetter":
            names.update(name for path_ in node.args for name in ast.literal_eval(path_).split("."))
    return {name for name in names if re.match(r"_[a-z]", name)}


def test_private_attributes_are_touched_in_one_module() -> None:
    """No other module of this folder knows one, and those that it knows are looked for above."""
    folder = Path(compat.__file__).parent
    others = {
        str(path.relative_to(folder)): found
        for path in sorted(folder.rglob("*.py"))
        if path.name != "compat.py" and (found := private_attributes(path))
    }
    assert others == {}
    known = {name for table in (LIGHTNING, TORCH) for names in table.values() for name in names}
    assert private_attributes(folder / "compat.py") - known == set()


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
    assert class_for(Mine(logger=False), "profilers", "PassThroughProfiler") is PassThroughProfiler


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
    """The other package, where it is installed."""
    module: ModuleType = pytest.importorskip("lightning.pytorch")
    return module


def make(pl: ModuleType, batch_size: int) -> Any:
    """A module of the other package, with dropout, that validates."""

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
def test_a_fit_of_the_other_package_is_bit_identical(how: str, pl: ModuleType, tmp_path: Path) -> None:
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
    assert [outcome.source for stage in again.results.values() for outcome in stage.values()] == ["cache", "cache"]
    for one, other in zip(found.parameters(), direct.parameters(), strict=True):
        assert torch.equal(one, other)
