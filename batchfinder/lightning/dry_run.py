"""The beginning of a run on the user's own trainer, and the probe that tries a batch size with it.

A dry run plays the beginning of a fit or an evaluation with the trainer's own loops, hooks, optimizers, precision and
strategy. It changes the trainer freely and puts nothing back: it runs inside a captured state. It never plays the end:
an epoch's or a run's last hooks save files and finish loggers, and take no memory that a batch size changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from pytorch_lightning import Trainer

from batchfinder.lightning.compat import (
    StageLoop,
    class_for,
    detects_anomaly,
    never_validate_by_time,
    new_evaluation_loop,
    new_fit_loop,
    set_attributes,
    set_loader,
    set_loss_scale,
)
from batchfinder.lightning.ddp import local_only
from batchfinder.lightning.dry_run_scope import ActiveCallbacks
from batchfinder.measure.trial import SteadyStateCheck, TrialSession, run_trial
from batchfinder.results import Measurement, Shape
from batchfinder.training.spec import MAX_BATCHES_WITHOUT_STEP, PEAK_MICRO_BATCHES, PEAK_STEPS

if TYPE_CHECKING:
    from batchfinder.lightning.compat import FitLoop

MakeBatch = Callable[[], Any]


class DryRun:
    """Plays what a stage of the trainer does with batches of a size.

    Args:
        trainer: set up, with its model on the device.
        callbacks: those that take part.
    """

    def __init__(self, trainer: Trainer, callbacks: ActiveCallbacks) -> None:
        self.trainer = trainer
        self.callbacks = callbacks

    def fit(self, make_batch: MakeBatch, length: int, micro_batches: int, check: SteadyStateCheck) -> None:
        """Take two optimizer steps, or more, in which no process waits for another.

        Args:
            make_batch: returns a new micro-batch on the host.
            length: how many batches an epoch is said to have.
            micro_batches: how many go into one optimizer step.
            check: says after these steps, and after each further one, whether to take another.
        """
        trainer = self.trainer
        module = trainer.lightning_module
        self._silence()
        trainer.limit_val_batches = 0  # a validation of its own would ask for the user's loaders
        trainer.accumulate_grad_batches = micro_batches if module.automatic_optimization else 1
        # A step that is skipped, because the scaled gradients overflow, leaves Adam's state unmade, which the peak
        # would lack. The scale takes no part in the memory.
        set_loss_scale(trainer.precision_plugin, 1.0)
        loop = new_fit_loop(trainer)
        loader = ProbeLoader(
            make_batch,
            PEAK_STEPS * micro_batches,
            length,
            check.goes_on,
            trainer.accumulate_grad_batches,
            self._has_stepped(loop),
        )
        set_loader(loop, loader)
        with local_only(trainer), torch.autograd.set_detect_anomaly(detects_anomaly(trainer)):
            for callback in self.callbacks.not_started:
                callback.on_fit_start(trainer, module)
            module.on_fit_start()
            module.zero_grad()
            loop.setup_data()
            loop.reset()
            loop.on_run_start()
            with suppress(StopIteration):
                loop.on_advance_start()
                loop.advance()

    def validate(self, make_batch: MakeBatch, length: int, check: SteadyStateCheck) -> None:
        """Validate after `fit`, as an epoch does, with the optimizer's state in memory."""
        trainer = self.trainer
        trainer.validating = True
        trainer.limit_val_batches = 1.0
        trainer.lightning_module.on_validation_model_zero_grad()
        self._run(trainer.fit_loop.epoch_loop.val_loop, make_batch, length, check)

    def evaluate(self, make_batch: MakeBatch, length: int, check: SteadyStateCheck) -> None:
        """Validate, test or predict on its own, whichever the trainer is doing."""
        self._silence()
        self._run(new_evaluation_loop(self.trainer), make_batch, length, check)

    def _run(self, loop: StageLoop, make_batch: MakeBatch, length: int, check: SteadyStateCheck) -> None:
        set_loader(loop, ProbeLoader(make_batch, PEAK_STEPS, length, check.goes_on))
        with local_only(self.trainer):
            loop.run()

    def _silence(self) -> None:
        """Let nothing be written, shown or stopped early."""
        trainer = self.trainer
        set_attributes(
            trainer,
            callbacks=self.callbacks.active,
            loggers=[class_for(trainer, "loggers.logger", "DummyLogger")()] if trainer.loggers else [],
            profiler=class_for(trainer, "profilers", "PassThroughProfiler")(),
            log_every_n_steps=1,
            should_stop=False,
            limit_train_batches=1.0,
            limit_val_batches=1.0,
            limit_test_batches=1.0,
            limit_predict_batches=1.0,
            val_check_interval=1.0,
            check_val_every_n_epoch=1,
            reload_dataloaders_every_n_epochs=0,
            overfit_batches=0,
        )
        never_validate_by_time(trainer)

    def _has_stepped(self, loop: FitLoop) -> Callable[[], bool]:
        """Whether each optimizer has stepped often enough; manual optimization steps when it likes."""
        if self.trainer.lightning_module.automatic_optimization:
            return lambda: True
        steps = PEAK_STEPS * len(self.trainer.optimizers)
        return lambda: loop.epoch_loop.global_step >= steps


class ProbeLoader:
    """An iterable that ends when enough steps were taken, and says it is longer, so that no epoch comes to its end.

    Args:
        make_batch: returns a new batch.
        least: batches to give.
        length: batches it is said to have.
        keep_going: asked after that many, and after each further step, for another.
        micro_batches: how many a step takes.
        has_stepped: asked before `keep_going`; until it says yes, batches are given, up to `MAX_BATCHES_WITHOUT_STEP`.
    """

    def __init__(
        self,
        make_batch: MakeBatch,
        least: int,
        length: int,
        keep_going: Callable[[], bool],
        micro_batches: int = 1,
        has_stepped: Callable[[], bool] = lambda: True,
    ) -> None:
        self._make_batch = make_batch
        self._least = least
        self._length = max(length, least + 1, MAX_BATCHES_WITHOUT_STEP + 1)
        self._keep_going = keep_going
        self._micro_batches = micro_batches
        self._has_stepped = has_stepped

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        given = 0
        while given < self._least or self._another(given):
            yield self._make_batch()
            given += 1

    def _another(self, given: int) -> bool:
        if (given - self._least) % self._micro_batches:
            return True
        return given < MAX_BATCHES_WITHOUT_STEP and (not self._has_stepped() or self._keep_going())


class Batches(Protocol):
    """Where batches of any size come from; see `probe_batches.py`."""

    def batch(self, batch_size: int, seq_len: int | None) -> Any:
        """A batch on the host."""
        ...

    def dataset_size(self) -> int | None:
        """Samples in the dataset; None where only reading would tell."""
        ...


class TrainBatches(NamedTuple):
    """What a fit trains with while it validates."""

    batch_size: int
    shape: Shape
    batches: Batches


@dataclass(frozen=True)
class TrialConfig:
    """What is tried, the size aside.

    Attributes:
        stage: `fit`, `validate`, `test` or `predict`.
        target_batch_size: samples per optimizer step, on all devices together; a size that is less than a device's
            part of it is tried with accumulation. None for no target.
        accumulation: what the trainer accumulates where there is no target.
        train: what a fit trains with while it validates.
        alone: whether the stage runs without a fit.
        num_devices: devices that train side by side.
        split_batch_size: samples of a batch on one device, where batches are split; a size that is less is tried with
            accumulation. None where batches are not split, or their size is unknown.
    """

    stage: str
    target_batch_size: int | None = None
    accumulation: int = 1
    train: TrainBatches | None = None
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
        dry_run: plays the stage.
        config: what to play.
        batches: where batches come from.
        session: what to put back after each try, and the memory to measure.
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(self, dry_run: DryRun, config: TrialConfig, batches: Batches, session: TrialSession) -> None:
        self._dry_run = dry_run
        self._config = config
        self._batches = batches
        self._session = session

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size.

        Raises:
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        config, dry_run, session = self._config, self._dry_run, self._session
        loaded = _loaded(self._batches, batch_size, shape)

        def fit_and_validate(check: SteadyStateCheck) -> None:
            assert config.train is not None
            size, train_shape, batches = config.train
            dry_run.fit(*_loaded(batches, size, train_shape), min(PEAK_MICRO_BATCHES, config.accumulation), check)
            dry_run.validate(*loaded, check)

        steps: Callable[[SteadyStateCheck], None] = fit_and_validate
        if config.alone:
            steps = partial(dry_run.evaluate, *loaded)
        elif config.train is None:
            steps = partial(dry_run.fit, *loaded, config.micro_batches(batch_size))
        try:
            return run_trial(
                steps,
                session.memory,
                session.device,
                session.open().restore,
                session.reserve_bytes,
                session.held_bytes,
            )
        except Exception as error:
            if dry_run.callbacks.inactive:
                error.add_note(
                    f"Raised while BatchFinder tried batch size {batch_size} without your callbacks "
                    f"{', '.join(dry_run.callbacks.inactive)}. If the step needs one of them, name it in "
                    "probe_callbacks=."
                )
            raise


def _loaded(batches: Batches, batch_size: int, shape: Shape) -> tuple[MakeBatch, int]:
    """How to make a batch, and batches per epoch."""
    return partial(batches.batch, batch_size, shape.seq_len), -(-(batches.dataset_size() or 0) // batch_size)
