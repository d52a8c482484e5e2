"""The beginning of a run, played on the user's own trainer: its loops, hooks, optimizers, precision and strategy.

A rehearsal changes the trainer freely and puts nothing back: it runs inside a captured state (see `trainer_state.py`).
It plays the beginning and never the end: an epoch's or a run's last hooks save files and finish loggers, and take no
memory that a batch size changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from batchfinder.lightning.ranks import without_the_others
from batchfinder.lightning.twins import twin

OPTIMIZER_STEPS = 2
"""Adam's state appears at the end of the first step, so the peak comes in the second."""

MOST_BATCHES = 64
"""Where manual optimization does not step for this many batches, it is taken not to step at all."""


class Rehearsal:
    """Plays what a stage of the trainer does with batches of a size.

    Args:
        trainer: set up, with its model on the device.
        callbacks: the callbacks that take part; those in `starting` have not seen `on_fit_start` yet.
        starting: see `callbacks`.
    """

    def __init__(self, trainer: Any, callbacks: list[Any], starting: list[Any]) -> None:
        self._trainer = trainer
        self._callbacks = callbacks
        self._starting = starting

    def without_the_others(self) -> AbstractContextManager[None]:
        """A context for what follows, in which no step waits for another process of the trainer."""
        return without_the_others(self._trainer)

    def train(self, make_batch: Callable[[], Any], length: int, micro_batches: int, more: Callable[[], bool]) -> None:
        """Take two optimizer steps, or more.

        Args:
            make_batch: returns a new micro-batch on the host.
            length: how many batches an epoch is said to have.
            micro_batches: how many go into one optimizer step.
            more: asked after these steps, and after each further one, for another.
        """
        trainer = self._trainer
        self._quieten()
        trainer.limit_val_batches = 0  # a validation of its own would ask for the user's loaders
        trainer.accumulate_grad_batches = micro_batches if trainer.lightning_module.automatic_optimization else 1
        self._never_skip()
        loop = self._new_fit_loop()
        least = OPTIMIZER_STEPS * micro_batches
        accumulated, stepped = trainer.accumulate_grad_batches, self._has_stepped(loop)
        loop._data_source = _source(loop, Feed(make_batch, least, length, more, accumulated, stepped))
        with torch.autograd.set_detect_anomaly(trainer._detect_anomaly):
            for callback in self._starting:
                callback.on_fit_start(trainer, trainer.lightning_module)
            trainer.lightning_module.on_fit_start()
            trainer.lightning_module.zero_grad()
            loop.setup_data()
            loop.reset()
            loop.on_run_start()
            with suppress(StopIteration):
                loop.on_advance_start()
                loop.advance()

    def validate_during_fit(self, make_batch: Callable[[], Any], length: int, more: Callable[[], bool]) -> None:
        """Validate after `train`, as an epoch does, with the optimizer's state in memory."""
        trainer = self._trainer
        trainer.validating = True
        trainer.limit_val_batches = 1.0
        loop = trainer.fit_loop.epoch_loop.val_loop
        trainer.lightning_module.on_validation_model_zero_grad()
        self._run(loop, make_batch, length, more)

    def evaluate(self, make_batch: Callable[[], Any], length: int, more: Callable[[], bool]) -> None:
        """Validate, test or predict on its own, whichever the trainer is doing."""
        trainer = self._trainer
        self._quieten()
        if trainer.predicting:
            trainer.predict_loop = loop = type(trainer.predict_loop)(trainer, trainer.predict_loop.inference_mode)
            loop.return_predictions = False
        else:
            name = "test_loop" if trainer.testing else "validate_loop"
            old = getattr(trainer, name)
            loop = type(old)(trainer, old._trainer_fn, old._stage, verbose=False, inference_mode=old.inference_mode)
            setattr(trainer, name, loop)
        self._run(loop, make_batch, length, more)

    def _run(self, loop: Any, make_batch: Callable[[], Any], length: int, more: Callable[[], bool]) -> None:
        loop._data_source = _source(loop, Feed(make_batch, OPTIMIZER_STEPS, length, more))
        loop.run()

    def _quieten(self) -> None:
        """Let nothing be written, shown or stopped early."""
        trainer = self._trainer
        trainer.callbacks = self._callbacks
        trainer.loggers = [twin(trainer, "loggers.logger", "DummyLogger")()] if trainer.loggers else []
        trainer.profiler = twin(trainer, "profilers", "PassThroughProfiler")()
        trainer.log_every_n_steps = 1
        trainer.should_stop = False
        for stage in ("train", "val", "test", "predict"):
            setattr(trainer, f"limit_{stage}_batches", 1.0)
        trainer.val_check_interval = 1.0
        trainer._val_check_time_interval = None
        trainer.check_val_every_n_epoch = 1
        trainer.reload_dataloaders_every_n_epochs = 0
        trainer.overfit_batches = 0

    def _never_skip(self) -> None:
        """Let no optimizer step be skipped because the scaled gradients overflow, as they often do in the first steps.

        A skipped step leaves Adam's state unmade, and the peak would lack it. The scale takes no part in the memory.
        """
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
            scaler._init_scale = 1.0
            if scaler._scale is not None:
                scaler._scale.fill_(1.0)

    def _new_fit_loop(self) -> Any:
        """A fit loop at its beginning in place of the user's, which is not touched."""
        trainer = self._trainer
        trainer.fit_loop = loop = type(trainer.fit_loop)(trainer, min_epochs=0, max_epochs=1)
        trainer._logger_connector.reset_results()
        trainer._logger_connector.reset_metrics()
        return loop

    def _has_stepped(self, loop: Any) -> Callable[[], bool]:
        """Whether each optimizer has stepped often enough; manual optimization steps when it likes."""
        trainer = self._trainer
        if trainer.lightning_module.automatic_optimization:
            return lambda: True
        enough = OPTIMIZER_STEPS * len(trainer.optimizers)
        return lambda: loop.epoch_loop.global_step >= enough


class Feed:
    """An iterable that ends when enough was seen, and says it is longer, so that no epoch comes to its end.

    Args:
        make_batch: returns a new batch.
        least: batches to give.
        length: batches it is said to have.
        more: asked after that many, and after each further step, for another.
        micro_batches: how many a step takes.
        stepped: asked before `more`; as long as it says no, batches are given without end, but for `MOST_BATCHES`.
    """

    def __init__(
        self,
        make_batch: Callable[[], Any],
        least: int,
        length: int,
        more: Callable[[], bool],
        micro_batches: int = 1,
        stepped: Callable[[], bool] = lambda: True,
    ) -> None:
        self._make_batch = make_batch
        self._least = least
        self._length = max(length, least + 1, MOST_BATCHES + 1)
        self._more = more
        self._micro_batches = micro_batches
        self._stepped = stepped

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        given = 0
        while given < self._least or self._goes_on(given):
            yield self._make_batch()
            given += 1

    def _goes_on(self, given: int) -> bool:
        if (given - self._least) % self._micro_batches:
            return True
        return given < MOST_BATCHES and (not self._stepped() or self._more())


def _source(loop: Any, feed: Feed) -> Any:
    return type(loop._data_source)(feed, loop._data_source.name)
