"""Which callbacks take part in a rehearsal.

What a rehearsal changes: everything the trainer can reach, and what must not be put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from batchfinder.lightning.compat import is_a, is_lightnings_own
from batchfinder.snapshot.training_state import TrainingState

_KEPT = ("BaseFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging")
_LEFT_OUT = (
    "BatchSizeFinder",
    "Checkpoint",
    "EarlyStopping",
    "LearningRateFinder",
    "ModelSummary",
    "ProgressBar",
    "Timer",
)


def active_callbacks(trainer: Any, finder: Any, named: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The callbacks that take part, and those of them whose `on_fit_start` comes after the finder's.

    Callbacks that change which layers train, or hold tensors or modules, take memory beside the step's. Others log,
    save or stop, which a rehearsal must not.

    Args:
        trainer: whose callbacks.
        finder: the callback that asks, which takes no part.
        named: callbacks or classes of them that take part whatever they hold.
    """
    named = tuple(named)
    classes = tuple(item for item in named if isinstance(item, type))

    def takes_part(callback: Any) -> bool:
        if callback is finder:
            return False
        if any(callback is item for item in named) or isinstance(callback, classes) or is_a(callback, *_KEPT):
            return True
        return not is_a(callback, *_LEFT_OUT) and _holds_tensors(vars(callback))

    kept = [callback for callback in trainer.callbacks if takes_part(callback)]
    later = trainer.callbacks[trainer.callbacks.index(finder) + 1 :]
    return kept, [callback for callback in kept if any(callback is other for other in later)]


def ahead_of_tuners(callbacks: list[Any], finder: Any) -> list[Any]:
    """The callbacks with the finder before a LearningRateFinder, which Lightning has put first.

    A learning rate is right for one batch size: it has to be looked for with the size that will train.

    Args:
        callbacks: the trainer's.
        finder: one of them.
    """
    tuners = [index for index, callback in enumerate(callbacks) if is_a(callback, "LearningRateFinder")]
    if not tuners or callbacks.index(finder) < tuners[0]:
        return callbacks
    others = [callback for callback in callbacks if callback is not finder]
    return [*others[: tuners[0]], finder, *others[tuners[0] :]]


def left_out(trainer: Any, finder: Any, kept: Iterable[Any]) -> list[str]:
    """Names of the user's own callbacks that took no part."""
    kept = list(kept)
    return [
        type(callback).__name__
        for callback in trainer.callbacks
        if callback is not finder and callback not in kept and not is_lightnings_own(callback)
    ]


def _holds_tensors(value: Any, depth: int = 2) -> bool:
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    if depth and isinstance(value, Mapping):
        return any(_holds_tensors(item, depth - 1) for item in value.values())
    if depth and isinstance(value, list | tuple):
        return any(_holds_tensors(item, depth - 1) for item in value)
    return False


def capture(trainer: Any, finder: Any) -> TrainingState:
    """Write down the trainer, its model, optimizers, schedulers, scaler, loops, loaders, callbacks and data.

    The loggers are left alone: a rehearsal has dummies in their place. So are the finder, which keeps what it found,
    and the progress bar, whose terminal the finder's own bar shares.

    Args:
        trainer: set up, with its model on the device.
        finder: the callback that asks.
    """
    return TrainingState.capture(trainer, trainer.lightning_module, left_alone=_apart(trainer, finder))


def capture_data(trainer: Any, finder: Any) -> TrainingState:
    """Write down what a look at the data can change: random numbers, loaders, and attributes; no tensors.

    Takes a few milliseconds for any model, since the tensors are neither copied nor put back.

    Args:
        trainer: set up.
        finder: the callback that asks.
    """
    import torch

    alone = [*_apart(trainer, finder), trainer.strategy, torch.Tensor, torch.optim.Optimizer]
    return TrainingState.capture(trainer, trainer.lightning_module, left_alone=alone)


def _apart(trainer: Any, finder: Any) -> list[Any]:
    bar = trainer.progress_bar_callback
    # The signal connector holds the process's own handlers, through which all of a program can be reached.
    return [finder, trainer._signal_connector, *trainer.loggers, *([] if bar is None else [bar])]
