"""Whatever the trainer is set to and whichever of Lightning's callbacks it has: training is bit for bit the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks
from torch.utils.data import DataLoader

from batchfinder import BatchFinder
from tests.lightning import nets
from tests.lightning.identical_runs import assert_identical, same, two_runs


class Net(nets.ConvNet):
    """Six batches of eight in an epoch."""

    def __init__(self, batch_size: int, **options: Any) -> None:
        super().__init__(batch_size, rows=48, side=6, width=4, **options)


class Validated(Net):
    """Validates, and notes its validation losses."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.validated: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.validated.append(loss.item())
        self.log("validation", loss)

    def val_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(12, self.side), batch_size=4)


class Plateau(Validated):
    """Its scheduler looks at the validation."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validation"}}


class Stepped(Net):
    """Its scheduler steps with each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class TwoOptimizers(Net):
    """Steps them in turn by hand, clips by hand, and steps a scheduler by hand."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        layers = list(self.net.children())
        first, second = (torch.nn.ModuleList(part).parameters() for part in (layers[:4], layers[4:]))
        one, two = torch.optim.Adam(first, lr=1e-3), torch.optim.SGD(second, lr=0.1)
        return [one, two], [torch.optim.lr_scheduler.StepLR(one, 3)]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())
        self.lr_schedulers().step()


class FromTheIterator(Net):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        loss = self.loss(next(dataloader_iter)[0])
        self.losses.append(loss.item())
        return loss


SETTINGS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "clip the norm": (Net, {"gradient_clip_val": 0.1}),
    "clip the values": (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "two optimizers by hand": (TwoOptimizers, {}),
    "dataloader_iter": (FromTheIterator, {}),
    "overfit 3 batches": (Validated, {"overfit_batches": 3}),
    "overfit a share": (Net, {"overfit_batches": 0.5}),
    "reload every epoch": (Net, {"reload_dataloaders_every_n_epochs": 1}),
    "sanity check": (Validated, {"num_sanity_val_steps": 2}),
    "barebones": (
        Net,
        {
            "barebones": True,
            "logger": None,
            "enable_checkpointing": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
        },
    ),
    "max_steps": (Net, {"max_steps": 7, "max_epochs": -1}),
    "max_steps, accumulated": (Net, {"max_steps": 3, "max_epochs": -1, "target": 16}),
    "limit_train_batches=4": (Net, {"limit_train_batches": 4}),
    "limit_train_batches=0.5": (Net, {"limit_train_batches": 0.5}),
    "limit_train_batches=0.67, accumulated": (Net, {"limit_train_batches": 0.67, "target": 16}),
    "validate within the epoch": (Validated, {"val_check_interval": 0.5}),
    "validate every 5 batches": (Validated, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "detect anomalies": (Net, {"detect_anomaly": True}),
    "no inference mode": (Validated, {"inference_mode": False}),
    "scheduler by epoch": (Stepped, {}),
    "scheduler by plateau": (Plateau, {}),
    "profiler": (Net, {"profiler": "simple"}),
    "max_time": (Net, {"max_time": {"hours": 1}}),
    "bf16-true": (Net, {"precision": "bf16-true"}),
    "64-true": (Validated, {"precision": "64-true"}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_of_the_trainer(setting: str) -> None:
    """It is served, and training goes on as if it had been started with the size."""
    net, options = SETTINGS[setting]
    found, direct = two_runs(net, **options)
    assert_identical(found, direct)
    if isinstance(found.module, Validated):
        assert found.module.validated == direct.module.validated != []


CALLBACKS: dict[str, tuple[type[Net], Any]] = {
    "stop early": (Validated, lambda: callbacks.EarlyStopping("validation", patience=1)),
    "stop early by the training loss": (Net, lambda: callbacks.EarlyStopping("loss", patience=1)),
    "average of the last weights": (Stepped, lambda: callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=0.5)),
    "moving average": (Net, lambda: callbacks.EMAWeightAveraging(decay=0.9)),
    "pruning": (Net, lambda: callbacks.ModelPruning("l1_unstructured", amount=0.2)),
    "schedule of accumulation": (Net, lambda: callbacks.GradientAccumulationScheduler({0: 2, 1: 3})),
    "model summary": (Net, lambda: callbacks.ModelSummary()),
    "timer": (Net, lambda: callbacks.Timer({"hours": 1})),
}


@pytest.mark.parametrize("before", [False, True], ids=["after the finder", "before the finder"])
@pytest.mark.parametrize("callback", CALLBACKS)
def test_every_callback_of_lightnings(callback: str, before: bool) -> None:
    """It sees one run, from the start, whether it comes before or after the finder."""
    net, make = CALLBACKS[callback]
    found, direct = two_runs(net, callbacks=lambda: [make()], before=before, max_epochs=3)
    assert_identical(found, direct)
    if isinstance(found.callbacks[0], callbacks.EarlyStopping):
        one, other = (run.callbacks[0] for run in (found, direct))
        assert one.state_dict() == other.state_dict()
        assert one.stopped_epoch == other.stopped_epoch


def test_a_learning_rate_is_looked_for_with_the_size_found(tmp_path: Path) -> None:
    """Though Lightning puts its LearningRateFinder before every other callback."""

    class Rated(Net):
        lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    found, direct = two_runs(
        Rated,
        callbacks=lambda: [callbacks.LearningRateFinder(1e-3, 1e-1, 40, early_stop_threshold=None)],
        default_root_dir=tmp_path,
        max_epochs=7,
    )
    assert found.module.lr == direct.module.lr != 1e-3
    assert_identical(found, direct)


def test_random_numbers_drawn_before_the_finder_stay_drawn() -> None:
    """Also where the optimizers are made again, because their scheduler asks how long training will be."""

    class Draws(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            torch.rand(3)

    found, direct = two_runs(lambda size: Net(size, scheduled=True), callbacks=lambda: [Draws()], before=True)
    assert_identical(found, direct)


def test_checkpoints_are_those_of_a_run_started_with_the_size(tmp_path: Path) -> None:
    """The same files with the same content, but for the callback's own state."""
    found, direct = two_runs(
        Validated,
        callbacks=lambda: [callbacks.ModelCheckpoint(monitor="validation", save_top_k=2, save_last=True)],
        options=lambda name: {"enable_checkpointing": True, "default_root_dir": tmp_path / name},
    )
    assert_identical(found, direct)
    one, other = (sorted((tmp_path / name).rglob("*.ckpt")) for name in ("found", "direct"))
    assert [path.name for path in one] == [path.name for path in other]
    assert len(one) == 3
    for found_path, direct_path in zip(one, other, strict=True):
        saved = [torch.load(path, weights_only=False) for path in (found_path, direct_path)]
        assert saved[0]["callbacks"].pop("BatchFinder")["batch_size"] == 8
        texts = [repr(content) for content in saved]
        assert texts[0].replace(str(tmp_path / "found"), "") == texts[1].replace(str(tmp_path / "direct"), "")


def test_the_log_has_the_learning_rates_of_a_run_started_with_the_size(tmp_path: Path) -> None:
    """LearningRateMonitor and a logger see the run, its peak as it ends, and nothing of the tries."""
    found, direct = two_runs(
        lambda size: Net(size, scheduled=True),
        callbacks=lambda: [callbacks.LearningRateMonitor()],
        options=lambda name: {"logger": pl.loggers.CSVLogger(tmp_path, name), "log_every_n_steps": 1},
    )
    assert_identical(found, direct)
    logs = [Path(run.trainer.logger.log_dir, "metrics.csv").read_text() for run in (found, direct)]  # type: ignore[union-attr]
    assert nets.without_peak(logs[0]) == logs[1]
    assert logs[1].count("\n") > 12


def test_hooks_of_the_users_callbacks_are_called_as_often_as_without_the_finder() -> None:
    """A callback that holds no tensors sees nothing of the tries, from setup to teardown."""

    class Counts(pl.Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattribute__(self, name: str) -> Any:
            if name.startswith(("on_", "setup", "teardown")):
                self.calls.append(name)
            return super().__getattribute__(name)

    found, direct = two_runs(Validated, callbacks=lambda: [Counts()])
    assert found.callbacks[0].calls == direct.callbacks[0].calls
    assert "on_fit_start" in found.callbacks[0].calls


def test_nothing_of_the_search_is_kept() -> None:
    """After the fit the trainer is as another's: no hook, wrapped method or copied state is left behind."""
    found, direct = two_runs(Net, target=16)
    assert vars(found.trainer).keys() == vars(direct.trainer).keys()
    assert vars(found.trainer.strategy).keys() == vars(direct.trainer.strategy).keys()
    assert vars(found.trainer.fit_loop).keys() == vars(direct.trainer.fit_loop).keys()
    assert vars(found.module).keys() == vars(direct.module).keys()
    assert found.trainer.accumulate_grad_batches == 1
    assert same(found.module, direct.module)


def test_a_scheduler_that_is_made_for_few_steps_is_not_stepped_by_tries() -> None:
    """OneCycleLR raises after its last step, of which a try takes more."""
    module = nets.ConvNet(2, rows=24, scheduled=True)
    trainer = nets.trainer(callbacks=[BatchFinder(max_batch_size=8)], max_steps=1)
    trainer.fit(module)
    (config,) = trainer.lr_scheduler_configs
    assert (config.scheduler.last_epoch, config.interval) == (1, "step")
