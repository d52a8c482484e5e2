"""The beginning of a run, played on the user's own trainer: its loops, hooks, optimizers, precision and strategy.

A rehearsal changes the trainer freely and puts nothing back: it runs inside a captured state (see `trainer_state.py`).
It plays the beginning and never the end: an epoch's or a run's last hooks save files and finish loggers, and take no
memory that a batch size changes.

Whether a size trains: a rehearsal on the user's own trainer, measured, and undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from batchfinder.lightning.compat import twin
from batchfinder.lightning.ddp import local_only
from batchfinder.measure.apart import at_home
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.trial import tried
from batchfinder.results import Measurement, Shape
from batchfinder.snapshot.training_state import TrainingState

OPTIMIZER_STEPS = 2
"""Adam's state appears at the end of the first step, so the peak comes in the second."""

MOST_BATCHES = 64
"""Where manual optimization does not step for this many batches, it is taken not to step at all."""


class DryRun:
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

    def local_only(self) -> AbstractContextManager[None]:
        """A context for what follows, in which no step waits for another process of the trainer."""
        return local_only(self._trainer)

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
        loop._data_source = _source(loop, ProbeLoader(make_batch, least, length, more, accumulated, stepped))
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
        loop._data_source = _source(loop, ProbeLoader(make_batch, OPTIMIZER_STEPS, length, more))
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


class ProbeLoader:
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


def _source(loop: Any, feed: ProbeLoader) -> Any:
    return type(loop._data_source)(feed, loop._data_source.name)


class Batches(Protocol):
    """Where batches of any size come from; see `lightning/batches.py`."""

    def batch(self, batch_size: int, seq_len: int | None) -> Any:
        """A batch on the host."""
        ...

    def dataset_size(self) -> int | None:
        """Samples in the dataset; None when nobody knows."""
        ...


@dataclass(frozen=True)
class Setting:
    """What is tried, the size aside.

    Attributes:
        stage: `fit`, `validate`, `test` or `predict`.
        target_batch_size: samples per optimizer step, on all devices together; a size that is less than a device's
            part of it is tried with accumulation. None for no target.
        accumulation: what the trainer accumulates where there is no target.
        train: the size and shape that a fit trains with while it validates, and its batches.
        alone: whether the stage runs without a fit.
        num_devices: devices that train side by side.
        split_batch_size: samples of a batch on one device, where batches are split; a size that is less is tried with
            accumulation. None where batches are not split, or nobody can tell.
    """

    stage: str
    target_batch_size: int | None = None
    accumulation: int = 1
    train: tuple[int, Shape, Batches] | None = None
    alone: bool = False
    num_devices: int = 1
    split_batch_size: int | None = None

    def micro_batches(self, batch_size: int) -> int:
        """How many micro-batches of this size to try in one optimizer step: two stand for any number."""
        if self.split_batch_size is not None:
            return 2 if batch_size < self.split_batch_size else 1
        target = self.target_batch_size
        accumulates = self.accumulation > 1 if target is None else batch_size * self.num_devices < target
        return 2 if accumulates else 1


class LightningProbe:
    """Tries a size on the trainer as it stands, and leaves no trace.

    Args:
        rehearsal: how to play the stage.
        setting: what to play.
        batches: where batches come from.
        state: what to put back after each try.
        memory: the device's memory.
        device: where the model is.
        reserve_bytes: to keep free.
        held_bytes: what `state` takes on the device.
        left_out: names of the user's callbacks that take no part.
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self,
        rehearsal: DryRun,
        setting: Setting,
        batches: Batches,
        state: TrainingState,
        memory: Memory,
        device: torch.device,
        reserve_bytes: int,
        held_bytes: int,
        left_out: Sequence[str] = (),
    ) -> None:
        self._rehearsal = rehearsal
        self._setting = setting
        self._batches = batches
        self._state = state
        self._memory = memory
        self._device = device
        self._reserve_bytes = reserve_bytes
        self._held_bytes = held_bytes
        self._left_out = left_out

    def warm_up(self, shape: Shape) -> None:
        """Let the process take what it takes once, which would be taken for what samples take. No size is judged by it.

        Args:
            shape: one sample's shape.
        """
        if self._memory.first_step_overhead:
            self(1, shape)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size.

        Args:
            batch_size: samples in the micro-batch.
            shape: one sample's shape.

        Raises:
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        try:
            return tried(
                lambda settling: self._rehearse(batch_size, shape, settling.goes_on),
                self._state,
                self._memory,
                self._device,
            )
        except Exception as error:
            if self._left_out:
                error.add_note(
                    f"Raised while BatchFinder tried batch size {batch_size} without your callbacks "
                    f"{', '.join(self._left_out)}. If the step needs one of them, name it in probe_callbacks=."
                )
            raise

    def _rehearse(self, batch_size: int, shape: Shape, more: Callable[[], bool]) -> None:
        setting = self._setting
        tried = self._feed(self._batches, batch_size, shape)
        limited = self._memory.limited(self._reserve_bytes, self._held_bytes)
        with self._rehearsal.local_only(), limited:
            if setting.alone:
                self._rehearsal.evaluate(*tried, more)
            elif setting.train is None:
                self._rehearsal.train(*tried, setting.micro_batches(batch_size), more)
            else:
                train_size, train_shape, batches = setting.train
                self._rehearsal.train(*self._feed(batches, train_size, train_shape), min(2, setting.accumulation), more)
                self._rehearsal.validate_during_fit(*tried, more)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def _feed(self, batches: Batches, batch_size: int, shape: Shape) -> tuple[Callable[[], Any], int]:
        """How to make a batch, and batches per epoch."""
        length = -(-(batches.dataset_size() or 0) // batch_size)
        return lambda: at_home(lambda: batches.batch(batch_size, shape.seq_len)), length
