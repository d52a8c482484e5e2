"""The same work in a Lightning trainer."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.peer.nets import NETS
from benchmarks.peer.state import state_of
from benchmarks.peer.work import SAMPLES, STEPS, Work


class Repeated(Dataset[torch.Tensor]):
    """One sample, as often as is asked for: the data take no memory of their own.

    Args:
        sample: a tensor.
    """

    def __init__(self, sample: torch.Tensor) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class Module(pl.LightningModule):
    """The net as a module with a loader of its own.

    Args:
        work: what is trained.
        batch_size: to begin with.
    """

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
        with self.work.meter.watching(self.work.device):
            super().optimizer_step(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Repeated(self.sample), batch_size=self.batch_size)


class Reached(Exception):
    """Training is about to begin."""


class AtStart(pl.Callback):
    """Notes the state as training begins, and ends the run there."""

    state: dict[str, str]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.state = state_of(pl_module.net, trainer.optimizers[0])
        raise Reached


def state_at_start(work: Work, callbacks: list[pl.Callback], batch_size: int) -> tuple[Module, dict[str, str]]:
    """Start a training with a finder, or without one, and stop before its first step.

    Args:
        work: what is trained; begun by now.
        callbacks: the finder, if any.
        batch_size: what the module has at first.

    Returns:
        The module, and digests of the state that training would begin with.
    """
    start = AtStart()
    module = Module(work, batch_size)
    try:
        _fit(work, module, [*callbacks, start])
    except Reached:
        return module, start.state
    raise RuntimeError("the training ended before it began")


def train(work: Work, batch_size: int) -> None:
    """A few steps, without a finder.

    Args:
        work: what is trained; begun by now.
        batch_size: of each batch.
    """
    _fit(work, Module(work, batch_size), [])


def _fit(work: Work, module: Module, callbacks: list[pl.Callback]) -> None:
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
