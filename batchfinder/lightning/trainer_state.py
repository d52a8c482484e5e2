"""What a rehearsal changes: everything the trainer can reach, and what must not be put back."""

from __future__ import annotations

from typing import Any

from batchfinder.probing.state import TrainingState


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
