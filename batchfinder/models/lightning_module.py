"""A LightningModule as a workload: its training_step and configure_optimizers are used, without a Trainer.

It is known by its methods, so that Lightning is imported only where the user's own code does so. Of its hooks only
`configure_model` runs; `setup` and data loading do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from batchfinder.errors import InvalidValue
from batchfinder.training.workload import Workload

RunUserCode = Callable[..., Any]
_LOGGERS = ("log", "log_dict")


def has_training_step(module: nn.Module) -> bool:
    """Whether this is a LightningModule, or a module that does as one."""
    return callable(getattr(module, "training_step", None)) and callable(getattr(module, "configure_optimizers", None))


def workload_from_training_step(module: nn.Module, what: str, run_user_code: RunUserCode) -> Workload:
    """Make a workload of a module with `training_step`, `configure_optimizers` and `make_batch`.

    Args:
        module: the module; `make_batch(batch_size, seq_len)` is a method of its own.
        what: the name the messages call it by.
        run_user_code: `run_user_code(what, function, *args)` calls a method of its.

    Raises:
        InvalidValue: it optimizes by hand, or has other than one optimizer.
    """
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise InvalidValue(
            "model",
            what,
            f"automatic optimization: {name} optimizes by hand, which is not supported by the simulator yet",
        )
    if callable(configure_model := getattr(module, "configure_model", None)):
        run_user_code(f"{what} ({name}.configure_model)", configure_model)
    # Asked once here, so that what cannot be simulated is said before anything is recorded.
    _single_optimizer(run_user_code(f"{what} ({name}.configure_optimizers)", module.configure_optimizers), name, what)
    return Workload(
        model=TrainingStep(module),
        make_batch=_WholeBatches(module.make_batch),  # type: ignore[arg-type]
        loss=_loss,
        optimizer=_ConfiguredOptimizer(module, what),
        # `Closure.closure` in pytorch_lightning/loops/optimization/automatic.py: training_step, zero_grad, backward.
        zero_grad_after_loss=True,
    )


class TrainingStep(nn.Module):
    """A module whose forward is another's training step, so that hooks see the names inside it.

    Args:
        module: the module with the `training_step`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        """Run the training step on a whole batch, as batch 0.

        Args:
            batch: what the module's `make_batch` returned.
        """
        step: Any = self.module.training_step
        takes_index = "batch_idx" in inspect.signature(step).parameters
        with _unlogged(self.module):
            return step(batch, 0) if takes_index else step(batch)


@dataclass(frozen=True)
class _WholeBatches:
    """`make_batch` whose batch reaches the model as one argument, whatever it is made of."""

    make_batch: Callable[[int, int | None], Any]

    def __call__(self, batch_size: int, seq_len: int | None) -> tuple[Any]:
        return (self.make_batch(batch_size, seq_len),)


@dataclass(frozen=True)
class _ConfiguredOptimizer:
    """The optimizer a module configures, asked for when its parameters are where they will be trained."""

    module: nn.Module
    what: str

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        configured = self.module.configure_optimizers()  # type: ignore[operator]
        return _single_optimizer(configured, type(self.module).__name__, self.what)


def _single_optimizer(configured: Any, name: str, what: str) -> torch.optim.Optimizer:
    """Return the one optimizer among what `configure_optimizers` may return.

    An optimizer, a list or tuple of them, (optimizers, schedulers), a dict with "optimizer", or a list of such dicts:
    https://lightning.ai/docs/pytorch/stable/common/lightning_module.html#configure-optimizers
    """
    given = configured
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list):
        given = given[0]
    if not isinstance(given, list | tuple):
        given = [given]
    optimizers = [entry.get("optimizer") if isinstance(entry, Mapping) else entry for entry in given]
    if len(optimizers) > 1:
        raise InvalidValue(
            "model", what, f"one optimizer: {name} has {len(optimizers)}, which is not supported by the simulator yet"
        )
    if not optimizers or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise InvalidValue("model", what, f"an optimizer from {name}.configure_optimizers, not {configured!r}")
    return optimizers[0]


def _loss(output: Any, batch: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise InvalidValue(
            "model", type(output).__name__, 'a training_step that returns a tensor or a dict with "loss"'
        )
    return loss


@contextmanager
def _unlogged(module: nn.Module) -> Iterator[None]:
    """Let `self.log` do nothing: without a Trainer there is nowhere to log to, and it would warn at every step."""
    taken = [name for name in _LOGGERS if hasattr(module, name) and name not in vars(module)]
    if getattr(module, "_trainer", None) is not None:
        taken = []
    for name in taken:
        vars(module)[name] = _log_nothing
    try:
        yield
    finally:
        for name in taken:
            vars(module).pop(name, None)


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass
