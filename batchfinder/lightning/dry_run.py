"""The beginning of a run on the user's own trainer, and the probe that tries a batch size with it.

A dry run plays the beginning of a fit or an evaluation with the trainer's own loops, hooks, optimizers, precision and
strategy. It changes the trainer freely and puts nothing back: it runs inside a captured state. It never plays the end:
an epoch's or a run's last hooks save files and finish loggers, and take no memory that a batch size changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback

from batchfinder.lightning.batch_size import Applied, set_attribute
from batchfinder.lightning.compat import (
    callbacks_of,
    detects_anomaly,
    is_a,
    is_lightnings_own,
    new_evaluation_loop,
    new_fit_loop,
    set_loader,
    signal_connector,
    silence,
)
from batchfinder.lightning.dataloaders import ProbeBatches
from batchfinder.lightning.ddp import local_only
from batchfinder.measure.trial import SteadyStateCheck, TrialSession, run_trial
from batchfinder.results import Measurement, Shape
from batchfinder.snapshot.training_state import TrainingState
from batchfinder.training.spec import MAX_BATCHES_WITHOUT_STEP, PEAK_MICRO_BATCHES, PEAK_STEPS

if TYPE_CHECKING:
    from batchfinder.lightning.compat import StageLoop

MakeBatch = Callable[[], Any]


@dataclass(eq=False)
class DryRun:
    """Plays what a stage of the trainer does with batches of a size. The trainer is set up, its model on the device."""

    trainer: Trainer
    callbacks: ActiveCallbacks

    def fit(
        self,
        make_batch: MakeBatch,
        length: int,
        stands_for: Any,
        micro_batches: int,
        check: SteadyStateCheck,
        others: Sequence[MakeBatch] = (),
    ) -> None:
        """Take two optimizer steps, or more, in which no process waits for another.

        Args:
            make_batch: returns a new micro-batch on the host.
            others: return new micro-batches of other sizes and lengths, each of which ends a step after these two; a
                step like the first ones follows.
            length: how many batches an epoch is said to have.
            stands_for: the user's loader, whose dataset or sampler a step may ask for.
            micro_batches: how many go into one optimizer step.
            check: says after these steps, and after each further one, whether to take another.
        """
        trainer = self.trainer
        module = trainer.lightning_module
        silence(trainer, self.callbacks.active)
        trainer.limit_val_batches = 0  # a validation of its own would ask for the user's loaders
        trainer.accumulate_grad_batches = micro_batches if module.automatic_optimization else 1
        loop = new_fit_loop(trainer)
        steps = PEAK_STEPS * len(trainer.optimizers)
        loader = ProbeLoader(
            make_batch,
            (PEAK_STEPS + len(others) + bool(others)) * micro_batches,
            length,
            check,
            trainer.accumulate_grad_batches,
            # Manual optimization steps when it likes.
            lambda: module.automatic_optimization or loop.epoch_loop.global_step >= steps,
            stands_for,
            {(PEAK_STEPS + number + 1) * micro_batches - 1: other for number, other in enumerate(others)},
        )
        set_loader(loop, loader)
        with local_only(trainer, as_in_training=True), torch.autograd.set_detect_anomaly(detects_anomaly(trainer)):
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

    def evaluate(
        self, make_batch: MakeBatch, length: int, stands_for: Any, check: SteadyStateCheck, after_fit: bool = False
    ) -> None:
        """Validate, test or predict, whichever the trainer is doing, for two batches or more; arguments as in `fit`.

        After a fit, validate as its epoch does, with the optimizer's state in memory.
        """
        trainer = self.trainer
        if after_fit:
            trainer.validating = True
            trainer.limit_val_batches = 1.0
            trainer.lightning_module.on_validation_model_zero_grad()
            loop: StageLoop = trainer.fit_loop.epoch_loop.val_loop
        else:
            silence(trainer, self.callbacks.active)
            loop = new_evaluation_loop(trainer)
        set_loader(loop, ProbeLoader(make_batch, PEAK_STEPS, length, check, stands_for=stands_for))
        with local_only(trainer):
            loop.run()


@dataclass(eq=False)
class ProbeLoader:
    """An iterable that ends when enough steps were taken, and says it is longer, so that no epoch comes to its end.

    It gives `least` batches, of which some are `others`, by their places. Then, after each step of `micro_batches`, it
    gives more until `has_stepped`, up to `MAX_BATCHES_WITHOUT_STEP`, and while the check goes on. Other attributes are
    those of the loader it `stands_for`.
    """

    make_batch: MakeBatch
    least: int
    length: int
    check: SteadyStateCheck
    micro_batches: int = 1
    has_stepped: Callable[[], bool] = field(default=lambda: True)
    stands_for: Any = None
    others: Mapping[int, MakeBatch] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        # The dataset or the sampler, for code of the user's that asks `trainer.train_dataloader`.
        if name.startswith("_") or name == "stands_for":
            raise AttributeError(name)
        return getattr(self.stands_for, name)

    def __len__(self) -> int:
        return max(self.length, self.least + 1, MAX_BATCHES_WITHOUT_STEP + 1)

    def __iter__(self) -> Iterator[Any]:
        given = 0
        while True:
            more = given - self.least
            after_a_step = more >= 0 and more % self.micro_batches == 0
            if after_a_step and (
                given >= MAX_BATCHES_WITHOUT_STEP or (self.has_stepped() and not self.check.goes_on())
            ):
                return
            with self.check.loading():
                batch = self.others.get(given, self.make_batch)()
            yield batch
            given += 1


class TrainBatches(NamedTuple):
    """What a fit trains with while it validates."""

    batch_size: int
    shape: Shape
    batches: ProbeBatches


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
        attribute: what the module or the datamodule calls its batch size, which is the size tried, as it will be in
            training; None for a stage or a split batch, whose size it is not.
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
    attribute: str | None = None

    def micro_batches(self, batch_size: int) -> int:
        """How many micro-batches of this size to try in one optimizer step: two stand for any number."""
        if self.split_batch_size is not None:
            return 2 if batch_size < self.split_batch_size else 1
        target = self.target_batch_size
        accumulates = self.accumulation > 1 if target is None else batch_size * self.num_devices < target
        return 2 if accumulates else 1


@dataclass(eq=False)
class LightningProbe:
    """Tries a size on the trainer as it stands, and leaves no trace: the session puts all back after each try."""

    dry_run: DryRun
    config: TrialConfig
    batches: ProbeBatches
    session: TrialSession
    smallest: int  # a size that runs if any does
    source: ClassVar[str] = "measured"
    unmodelled: ClassVar[tuple[str, ...]] = ()

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size. What the user's code raises that is not about the size comes unchanged, with all put back."""
        config, dry_run, session = self.config, self.dry_run, self.session
        module = dry_run.trainer.lightning_module

        def loaded(batches: ProbeBatches, size: int, shape: Shape) -> tuple[MakeBatch, int, Any]:
            length = -(-(batches.dataset_size() or 0) // size)
            return partial(batches.batch, size, shape.seq_len), length, batches.loaders

        tried = loaded(self.batches, batch_size, shape)

        applied = Applied()

        def steps(check: SteadyStateCheck) -> None:
            if config.attribute is not None:
                applied.undoing.extend(set_attribute(module, config.attribute, batch_size).undoing)
            if config.alone:
                dry_run.evaluate(*tried, check)
            elif config.train is None:
                full, length, loaders = tried

                def made(make: MakeBatch, counts: bool) -> Any:
                    session.stepping.counts = counts
                    return make()

                others = [partial(made, other, False) for other in self.batches.others(batch_size, shape.seq_len)]
                dry_run.fit(partial(made, full, True), length, loaders, config.micro_batches(batch_size), check, others)
            else:
                size, train_shape, batches = config.train
                dry_run.fit(*loaded(batches, size, train_shape), min(PEAK_MICRO_BATCHES, config.accumulation), check)
                dry_run.evaluate(*tried, check, after_fit=True)

        try:
            seen = run_trial(
                steps,
                session.memory,
                session.device,
                session.open().restore,
                session.reserve_bytes,
                session.held_bytes,
                stepping=session.stepping,
                timed_steps=session.timed_steps,
            )
        except Exception as error:
            if dry_run.callbacks.inactive:
                error.add_note(
                    f"Raised while BatchFinder tried batch size {batch_size} without your callbacks "
                    f"{', '.join(dry_run.callbacks.inactive)}. If the step needs one of them, name it in "
                    "probe_callbacks=."
                )
            elif isinstance(error, _OF_STAND_INS):
                error.add_note(
                    f"Raised while BatchFinder tried batch size {batch_size}, where the trainer's loaders and loggers "
                    "are stand-ins, callbacks that save or stop are left out, and nothing is validated or logged."
                )
            raise
        finally:
            applied.undo()  # a size in an object that is not among what is put back
        if config.stage == "fit" and not config.alone and config.train is None and batch_size > self.smallest:
            seen = session.stepping.compared(seen, lambda: self(self.smallest, shape))
        return seen


_OF_STAND_INS = (AttributeError, IndexError, KeyError, TypeError)
"""What code raises that looks for something of a loader or a logger which its stand-in does not have."""

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
