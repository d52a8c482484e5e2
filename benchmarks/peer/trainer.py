"""The same work in a Lightning trainer."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.peer.work import NETS, SAMPLES, STEPS, Work, state_digests


class RepeatedSample(Dataset[torch.Tensor]):
    """One sample, `SAMPLES` times: the data take no memory of their own."""

    def __init__(self, sample: torch.Tensor) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class NetModule(pl.LightningModule):
    """The work's net, with a `batch_size` and a DataLoader."""

    def __init__(self, work: Work, batch_size: int) -> None:
        super().__init__()
        self.work = work
        self.net = work.model()
        self.batch_size = batch_size
        self.sample = NETS[work.net].batch(1)[0]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.work.loss(self.net, batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Forward, backward and step all run in here."""
        with self.work.meter.counting_errors(self.work.device):
            super().optimizer_step(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(RepeatedSample(self.sample), batch_size=self.batch_size)


class TrainingStarted(Exception):
    """Ends a run before its first step."""


class StopAtStart(pl.Callback):
    """Keeps digests of the state with which training starts, and ends the run there."""

    state: dict[str, str]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.state = state_digests(pl_module.net, trainer.optimizers[0])
        raise TrainingStarted


def state_at_start(work: Work, callbacks: list[pl.Callback], batch_size: int) -> tuple[NetModule, dict[str, str]]:
    """Start a training, with or without a finder among its callbacks, and stop before its first step.

    Returns:
        The module, and digests of the state with which training would start.
    """
    stop = StopAtStart()
    module = NetModule(work, batch_size)
    try:
        _fit(work, module, [*callbacks, stop])
    except TrainingStarted:
        return module, stop.state
    raise RuntimeError("fit returned before on_train_start")


def train(work: Work, batch_size: int) -> None:
    """Train a few steps, without a finder."""
    _fit(work, NetModule(work, batch_size), [])


def _fit(work: Work, module: NetModule, callbacks: list[pl.Callback]) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="gpu" if work.device == "cuda" else "cpu",
            devices=1,
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=callbacks,
        )
        trainer.fit(module)
