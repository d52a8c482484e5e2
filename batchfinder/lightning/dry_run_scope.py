"""What a dry run of a trainer may touch: which callbacks take part, and what is captured to be put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback

from batchfinder.lightning.compat import callbacks_of, is_a, is_lightnings_own, signal_connector
from batchfinder.snapshot.training_state import TrainingState

_ACTIVE = ("BaseFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging")
_INACTIVE = (
    "BatchSizeFinder",
    "Checkpoint",
    "EarlyStopping",
    "LearningRateFinder",
    "ModelSummary",
    "ProgressBar",
    "Timer",
)


@dataclass(frozen=True)
class ActiveCallbacks:
    """A trainer's callbacks, as a dry run sees them.

    `not_started` are those of the active that have not seen `on_fit_start` yet, `inactive` the names of the user's own
    that take no part.
    """

    active: list[Callback]
    not_started: list[Callback]
    inactive: list[str]


def active_callbacks(
    trainer: Trainer, finder: Callback, named: Iterable[Callback | type[Callback]], extra: Iterable[Callback] = ()
) -> ActiveCallbacks:
    """Choose the callbacks that take part in dry runs: the `named` (or their classes), whatever they hold, among them.

    Callbacks that change which layers train, or hold tensors or modules, take memory beside the step's. Others log,
    save or stop, which a dry run must not. `extra` ones take part and are not the trainer's.
    """
    named = tuple(named)
    classes = tuple(item for item in named if isinstance(item, type))
    active, not_started, inactive = [], [], []
    callbacks = callbacks_of(trainer)
    for index, callback in enumerate(callbacks):
        if callback is finder:
            continue
        takes_part = any(callback is item for item in named) or isinstance(callback, classes)
        if not takes_part and not is_a(callback, *_INACTIVE):
            takes_part = _holds_tensors(vars(callback))
        if takes_part or is_a(callback, *_ACTIVE):
            active.append(callback)
            if index > callbacks.index(finder):
                not_started.append(callback)
        elif not is_lightnings_own(callback):
            inactive.append(type(callback).__name__)
    return ActiveCallbacks([*active, *extra], not_started, inactive)


def move_ahead_of_tuners(trainer: Trainer, finder: Callback) -> None:
    """Move the finder before a LearningRateFinder, which Lightning has put first.

    A learning rate is right for one batch size: it has to be looked for with the size that will train.
    """
    callbacks = callbacks_of(trainer)
    tuners = [index for index, callback in enumerate(callbacks) if is_a(callback, "LearningRateFinder")]
    if tuners and callbacks.index(finder) > tuners[0]:
        others = [callback for callback in callbacks if callback is not finder]
        vars(trainer)["callbacks"] = [*others[: tuners[0]], finder, *others[tuners[0] :]]


def _holds_tensors(value: object, depth: int = 2) -> bool:
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    if depth and isinstance(value, Mapping):
        return any(_holds_tensors(item, depth - 1) for item in value.values())
    if depth and isinstance(value, list | tuple):
        return any(_holds_tensors(item, depth - 1) for item in value)
    return False


def capture(trainer: Trainer, finder: Callback, *left_alone: object) -> TrainingState:
    """Capture the trainer, its model, optimizers, schedulers, scaler, loops, loaders, callbacks and data.

    The loggers are left alone: a dry run has dummies in their place. So are the finder, which keeps what it found,
    and the progress bar, whose terminal the finder's own bar shares.
    """
    bar = trainer.progress_bar_callback
    alone = [finder, signal_connector(trainer), *trainer.loggers, *([] if bar is None else [bar]), *left_alone]
    return TrainingState.capture(trainer, trainer.lightning_module, left_alone=alone)


def capture_data(trainer: Trainer, finder: Callback) -> TrainingState:
    """Capture what a look at the data can change: random numbers, loaders, and attributes; no tensors.

    Takes a few milliseconds for any model, since the tensors are neither copied nor put back.
    """
    return capture(trainer, finder, trainer.strategy, torch.Tensor, torch.optim.Optimizer)
