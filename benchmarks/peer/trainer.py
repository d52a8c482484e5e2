"""The same work in a Lightning trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from benchmarks.peer.work import STATE, module_of, state_digests, steps_of
from benchmarks.random_fit.draw import Fit
from benchmarks.random_fit.parts import Module, trainer


class TrainingStarted(Exception):
    """Ends a run before its first step."""


class StopAtStart(pl.Callback):
    """Keeps digests of the state with which training starts, and ends the run there."""

    state: dict[str, str]

    def __init__(self, fit: Fit) -> None:
        self.fit = fit

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.state = state_digests(pl_module, trainer.optimizers[0]) if self.fit == STATE else {}
        raise TrainingStarted


def start(fit: Fit, module: Module, callbacks: Sequence[pl.Callback] = ()) -> dict[str, str]:
    """Start a training, with or without a finder among its callbacks, and stop before its first step.

    Returns:
        Digests of the state with which training would start.
    """
    stop = StopAtStart(fit)
    try:
        trainer(fit, [*callbacks, stop], max_steps=steps_of(fit, 1)).fit(module)
    except TrainingStarted:
        return stop.state
    raise RuntimeError("fit returned before on_train_start")


def train(fit: Fit, batch_size: int) -> None:
    """Train without a finder."""
    trainer(fit, [], max_steps=steps_of(fit, batch_size)).fit(module_of(fit, batch_size))
