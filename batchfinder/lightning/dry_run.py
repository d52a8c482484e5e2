"""The beginning of a run on the user's own trainer, and the probe that tries a batch size with it.

A dry run plays the beginning of a fit or an evaluation with the trainer's own loops, hooks, optimizers, precision and
strategy. It changes the trainer freely and puts nothing back: it runs inside a captured state. It never plays the end:
an epoch's or a run's last hooks save files and finish loggers, and take no memory that a batch size changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise, repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from batchfinder.data.batch import tensors
from batchfinder.errors import shortened
from batchfinder.lightning.batch_size import Applied, set_attribute
from batchfinder.lightning.compat import (
    callbacks_of,
    detects_anomaly,
    is_a,
    is_lightnings_own,
    new_evaluation_loop,
    new_fit_loop,
    restore_optimizers,
    set_epoch,
    set_loader,
    set_loss_scale,
    signal_connector,
    silence,
)
from batchfinder.lightning.dataloaders import ProbeBatches
from batchfinder.lightning.ddp import local_only
from batchfinder.lightning.schedule import Schedule
from batchfinder.measure.allocator_history import AllocatorHistory
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.oom import classify
from batchfinder.measure.trial import (
    TrialSession,
    TrialSteps,
    further_orders,
    give_back_cache,
    prepare_cache,
    run_trial,
    until_reserved_stays,
)
from batchfinder.results import Measurement, Shape
from batchfinder.simulator.trace import Trace
from batchfinder.snapshot.training_state import TrainingState
from batchfinder.training.spec import MAX_BATCHES_WITHOUT_STEP, PEAK_MICRO_BATCHES, PEAK_STEPS
from batchfinder.units import format_bytes

if TYPE_CHECKING:
    from batchfinder.lightning.compat import StageLoop

MakeBatch = Callable[[], Any]


class Feed(NamedTuple):
    """Batches of one kind.

    Attributes:
        make_batch: returns a new one on the host.
        length: how many of them an epoch has; 0 where that is not known.
        stands_for: the user's loader, whose dataset or sampler a step may ask for.
    """

    make_batch: MakeBatch
    length: int
    stands_for: Any


@dataclass(eq=False)
class DryRun:
    """Plays what a stage of the trainer does with batches of a size. The trainer is set up, its model on the device.

    Attributes:
        memory: of the model's device.
        schedule: what a fit does besides full batches.
        not_tried: what fits could not do, in words: an optimizer that never stepped, a validation that raised.
        failed_in_validation: whether the last fit ran out of memory in its validation.
        growth: what each step keeps in memory and the next does not free, in words; empty for nothing.
        validation_growth: what each batch of a validation does, likewise.
    """

    trainer: Trainer
    callbacks: ActiveCallbacks
    memory: Memory
    schedule: Schedule = field(default_factory=Schedule)
    not_tried: dict[str, str] = field(default_factory=dict, init=False)
    growth: str = field(default="", init=False)
    validation_growth: str = field(default="", init=False)
    failed_in_validation: bool = field(default=False, init=False)

    def fit(
        self,
        full: Feed,
        accumulation: int,
        taken: TrialSteps,
        others: Sequence[MakeBatch] = (),
        last: Sequence[MakeBatch] = (),
        validation: Feed | None = None,
        validation_is_tried: bool = False,
    ) -> None:
        """Take the phases of the schedule, in which no process waits for another.

        These are, in this order: the optimizers' restored states; a step that the scaler skips; two optimizer steps, or
        as many as it takes until each optimizer has stepped; steps of the batches of other lengths, and a full one; an
        epoch's worth of what each step keeps, where it keeps some; the epoch's smaller last batch; a validation; the
        next epoch, a validation's end between the micro-batches of one of its steps where the fit has such, its last
        batch, and the first steps of one more where the cache is kept between epochs; where validations are within
        epochs, the batches between the last of them and an epoch's end, and then the next epoch's first steps; two
        steps of each epoch that changes what trains.

        Args:
            full: micro-batches of the size that is tried.
            accumulation: how many go into one optimizer step; two stand for any number.
            taken: says whether to take further steps; where they are recorded, it is the first ones and those of the
                last epoch that changes what trains.
            others: return new micro-batches of other lengths.
            last: returns an epoch's last batch, where that is smaller.
            validation: the batches of the validation in the fit; None for none.
            validation_is_tried: whether its size is what is tried, so that whatever it raises is raised.
        """
        trainer, schedule, self.failed_in_validation = self.trainer, self.schedule, False
        module = trainer.lightning_module
        kept, micro_batches = Kept(), min(PEAK_MICRO_BATCHES, accumulation)
        rest = 0 if validation is None else schedule.after_last_validation(full.length)
        validates_at_end = schedule.empties_cache and not rest and trainer.check_val_every_n_epoch == 1
        silence(trainer, self.callbacks.active)
        trainer.limit_val_batches = 0  # a validation of its own would ask for the user's loaders
        trainer.accumulate_grad_batches = micro_batches if module.automatic_optimization else 1
        loop = new_fit_loop(trainer)
        loader = ProbeLoader(full.length, taken, full.stands_for)
        set_loader(loop, loader)

        def whole_steps(count: int) -> Iterator[MakeBatch]:
            return repeat(full.make_batch, count * micro_batches)

        def first_epoch() -> Iterator[MakeBatch]:
            if schedule.skips_a_step and module.automatic_optimization:
                set_loss_scale(trainer, math.inf)
                yield from whole_steps(1)
                set_loss_scale(trainer, 1.0)
            # Where an epoch is a single step, its smaller last batch comes before the optimizer makes its state.
            yield from end_of_epoch() if last and full.length <= accumulation else whole_steps(1)
            resting = [self.memory.held_bytes()]
            yield from whole_steps(PEAK_STEPS - 1)
            if not module.automatic_optimization:
                yield from self._until_each_has_stepped(stepped, full.make_batch)
            if taken.history is not None:
                # One more: the first made the optimizer's state. Beside the second DDP's first buckets are still held.
                yield from whole_steps(1 if trainer.strategy.model is module else 2)
                return
            resting.append(self.memory.held_bytes())
            if others:
                yield from of_other_lengths(others)
            yield from self._beside_what_an_epoch_keeps(resting, full.length // micro_batches, whole_steps, kept)
            yield from self._until_reserved_stays(whole_steps)
            yield from _while_timed(taken, lambda: whole_steps(1))
            yield from end_of_epoch()

        def end_of_epoch() -> Iterator[MakeBatch]:
            """Its smaller last batch; and where the last step has a single micro-batch, that one alone."""
            alone = accumulation > 1 and full.length % accumulation == 1
            if last:
                yield from islice(whole_steps(1), 0 if alone else micro_batches - 1)
                yield from last
            elif alone:
                yield full.make_batch

        def of_other_lengths(order: Sequence[MakeBatch]) -> Iterator[MakeBatch]:
            yield from order
            yield from islice(whole_steps(1), -len(order) % micro_batches)
            yield from whole_steps(1)

        def later_epoch(epoch: int) -> Iterator[MakeBatch]:
            if taken.history is not None:
                yield from whole_steps(PEAK_STEPS + 1)
                return
            if rest and epoch == 2:
                yield from whole_steps(min(rest - bool(last), PEAK_STEPS))
                yield from last
                return
            if others and epoch == 1:
                for order in further_orders(others, self.memory):
                    yield from of_other_lengths(order)
            yield from whole_steps(PEAK_STEPS)
            yield from self._until_reserved_stays(whole_steps)
            if epoch == 1:  # after a validation the cache lies otherwise than in the first
                if micro_batches > 1 and schedule.validates_within_a_step(full.length, accumulation):
                    yield full.make_batch
                    give_back_cache(trainer.strategy.root_device)
                    yield from islice(whole_steps(1), 1, None)
                    yield from whole_steps(PEAK_STEPS)
                yield from end_of_epoch()

        def in_epochs(batches: Iterator[MakeBatch]) -> Iterator[MakeBatch]:
            """Empty the cache where training would begin another epoch, as the callback does: one may be shorter."""
            if not schedule.empties_cache or taken.history is not None or not full.length:
                yield from batches
                return
            whole, rest_of_step = divmod(full.length, accumulation)
            of_an_epoch = whole * micro_batches + min(rest_of_step, micro_batches)
            for count, make_batch in enumerate(batches):
                begins = count > 0 and count % of_an_epoch == 0
                yield partial(in_next_epoch, make_batch) if begins else make_batch

        def in_next_epoch(make_batch: MakeBatch) -> Any:
            empty_cache(after_validation=validates_at_end)
            return make_batch()

        def empty_cache(after_validation: bool) -> None:
            if after_validation and taken.history is None:  # Lightning lets go of the gradients before it
                module.on_validation_model_zero_grad()
            give_back_cache(trainer.strategy.root_device)

        with (
            local_only(trainer, as_in_training=True),
            torch.autograd.set_detect_anomaly(detects_anomaly(trainer)),
            _noted_steps() as stepped,
        ):
            for callback in self.callbacks.not_started:
                callback.on_fit_start(trainer, module)
            module.on_fit_start()
            if schedule.restores_optimizers:
                restore_optimizers(trainer)
            prepare_cache(trainer.strategy.root_device)  # as the callback does when training starts
            module.zero_grad()
            loop.setup_data()
            loop.reset()
            loop.on_run_start()
            on_gpu = trainer.strategy.root_device.type == "cuda"
            needed = {*schedule.later_epochs, *([] if validation is None else [1])}
            needed |= {2, 3} if rest else set()
            keeps_end = on_gpu and last and not schedule.empties_cache  # of an epoch in the cache, for the next ones
            usual = {1, 2} if keeps_end else {1} if on_gpu else set()
            epochs = [0, *sorted(needed | usual)]
            if taken.history is not None:
                epochs = [0, *schedule.later_epochs[-1:]]
            asked = 1
            for epoch in epochs:
                if epoch and self.growth and epoch not in needed:
                    continue  # what the first epoch kept is still there, which its end would have freed
                for between in range(asked, epoch):
                    _ask_finetuning(trainer, between)
                asked = epoch + 1
                set_epoch(loop, epoch)
                loader.batches = partial(in_epochs, first_epoch() if epoch == 0 else later_epoch(epoch))
                with suppress(StopIteration):
                    loop.on_advance_start()
                    loop.advance()
                if epoch == 0:
                    peak_of_steps = self.memory.peaks()[0] or 0
                if taken.times_cache_given_back():
                    break
                # In the fit the callback empties the cache around validations, and once as training starts: where
                # lengths differ, before batches of any length. The second epoch here begins so.
                if schedule.empties_cache or (others and epoch == 0):
                    # What comes next in the third is the rest of an epoch, after its last validation.
                    within = rest > 0 and epoch == 1 and (full.length - rest) % accumulation == 0
                    empty_cache(after_validation=within or validates_at_end)
                tries_validation = taken.history is None and "validation" not in self.not_tried
                if epoch == 0 and validation is not None and tries_validation:
                    self._validate(validation, taken, validation_is_tried)
                    give_back_cache(trainer.strategy.root_device)
                kept.tensors.clear()
            taken.peaked_later = (self.memory.peaks()[0] or 0) > peak_of_steps

    def evaluate(self, batches: Feed, taken: TrialSteps) -> None:
        """Validate, test or predict, whichever the trainer is doing, for two batches or more."""
        silence(self.trainer, self.callbacks.active)
        loop = new_evaluation_loop(self.trainer)
        loader = ProbeLoader(batches.length, taken, batches.stands_for)
        loader.batches = lambda: chain(
            repeat(batches.make_batch, PEAK_STEPS), _while_timed(taken, lambda: repeat(batches.make_batch, 1))
        )
        set_loader(loop, loader)
        with local_only(self.trainer):
            loop.run()

    def _validate(self, batches: Feed, taken: TrialSteps, is_tried: bool) -> None:
        """Validate as a fit's epoch does, for two batches, with the optimizer's state in memory.

        Where each batch leaves some memory behind, as a list of predictions does, a whole validation is run, whose end
        may put them together; of a long one the first batches, and one beside what all leave. To hooks it is a sanity
        check, in which those that write or decide something usually do nothing. What it raises that is not about memory
        is raised only where its size is what is tried: the fit may not get as far.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        trainer.sanity_checking, trainer.num_sanity_val_steps, trainer.limit_val_batches = True, math.inf, 1.0
        loop: StageLoop = trainer.fit_loop.epoch_loop.val_loop
        loader = ProbeLoader(batches.length, taken, batches.stands_for)
        device, held = trainer.strategy.root_device, list[int]()

        def given() -> Iterator[MakeBatch]:
            for _ in range(min(PEAK_STEPS + 1, batches.length or PEAK_STEPS)):
                if len(held) == PEAK_STEPS and (device.type != "cuda" or held[1] <= held[0]):
                    return
                yield batches.make_batch
                held.append(self.memory.held_bytes())
            growth = min((after - before for before, after in pairwise(held)), default=0)
            if device.type != "cuda" or growth * batches.length < _LEAST_KEPT_BYTES:
                return
            where = _longest_list(module)
            self.validation_growth = f"{format_bytes(growth)} with each batch" + (f", in {where}" if where else "")
            to_come = batches.length - len(held)
            yield from repeat(batches.make_batch, min(to_come, _MOST_VALIDATED) - 1)
            left_out = range(to_come - _MOST_VALIDATED)
            kept = [torch.empty(growth, dtype=torch.uint8, device=device) for _ in left_out]
            yield from repeat(batches.make_batch, min(to_come, 1))
            kept.clear()

        loader.batches = given
        set_loader(loop, loader)
        try:
            module.on_validation_model_zero_grad()
            loop.run()
        except Exception as error:
            self.failed_in_validation = classify(error, device=trainer.strategy.root_device.type) is not None
            if is_tried or self.failed_in_validation:
                raise
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self.not_tried["validation"] = f"the fit's validation, which raised {shortened(text)}"
        trainer.training, trainer.limit_val_batches = True, 0

    def _until_each_has_stepped(self, stepped: Counter[int], make_batch: MakeBatch) -> Iterator[MakeBatch]:
        """Batches of manual optimization until each optimizer has stepped, and one more; none where all have."""
        optimizers = [each for each in self.trainer.optimizers if not is_a(each, "_MockOptimizer")]
        given = PEAK_STEPS
        while True:
            waiting = [each for each in optimizers if not stepped[id(each)]]
            if not waiting and stepped.total() >= PEAK_STEPS * len(optimizers):
                break
            if given == MAX_BATCHES_WITHOUT_STEP:
                if stepped and waiting:
                    names = ", ".join(f"{type(each).__name__} {optimizers.index(each)}" for each in waiting)
                    self.not_tried["optimizers"] = f"a step of {names}, which did not step in the first {given} batches"
                return
            given += 1
            yield make_batch
        if given > PEAK_STEPS:
            yield make_batch

    def _until_reserved_stays(self, whole_steps: Callable[[int], Iterator[MakeBatch]]) -> Iterator[MakeBatch]:
        """Steps until two have gone by in which the allocator reserved no more: each may leave the cache in pieces."""
        device = self.trainer.strategy.root_device
        if device.type != "cuda" or self.growth:
            return
        for _ in until_reserved_stays(device):
            yield from whole_steps(1)

    def _beside_what_an_epoch_keeps(
        self, resting: list[int], steps: int, whole_steps: Callable[[int], Iterator[MakeBatch]], kept: Kept
    ) -> Iterator[MakeBatch]:
        """Where each step keeps some memory, as a metric of all predictions does: a step beside an epoch's worth of it.

        Args:
            resting: what was held after the first step and after the next.
            steps: how many steps an epoch has.
            kept: holds what more steps would have kept, until the epoch ends.
        """
        if self.trainer.strategy.root_device.type != "cuda":
            return  # what is resident grows for other reasons too
        for _ in range(PEAK_STEPS):  # in two further steps of three, by which what is made once is made
            if resting[-1] <= resting[-2]:
                return
            yield from whole_steps(1)
            resting.append(self.memory.held_bytes())
        grown = [after - before for before, after in pairwise(resting)]
        growth = min(grown[-PEAK_STEPS:])
        if growth * max(1, steps) < _LEAST_KEPT_BYTES:
            return
        where = _longest_list(self.trainer.lightning_module)
        self.growth = f"{format_bytes(growth)} with each step" + (f", in {where}" if where else "")
        # Of an epoch's worth these steps have kept some already. A few stand for the others, and keep more each.
        to_come = steps - (resting[-1] - resting[0]) // growth - 1
        if to_come > 0:
            taken = min(to_come, _KEEPING_STEPS)
            kept.begin(growth, (to_come - taken) / taken, self.trainer.strategy.root_device)
            trainer: Any = self.trainer
            trainer.callbacks = [*self.callbacks.active, kept]
            yield from whole_steps(taken)
            trainer.callbacks = self.callbacks.active


def _ask_finetuning(trainer: Trainer, epoch: int) -> None:
    """Let finetuning callbacks freeze and unfreeze what they do at the beginning of an epoch that is not played."""
    set_epoch(trainer.fit_loop, epoch)
    for callback in callbacks_of(trainer):
        if is_a(callback, "BaseFinetuning"):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def _while_timed(taken: TrialSteps, step: Callable[[], Iterator[MakeBatch]]) -> Iterator[MakeBatch]:
    for _ in range(MAX_BATCHES_WITHOUT_STEP):
        if not taken.goes_on():
            return
        yield from step()


@contextmanager
def _noted_steps() -> Iterator[Counter[int]]:
    """Count the steps of each optimizer meanwhile, by its id."""
    stepped: Counter[int] = Counter()

    def note(optimizer: Optimizer, arguments: object, options: object) -> None:
        stepped[id(optimizer)] += 1

    hook = register_optimizer_step_post_hook(note)
    try:
        yield stepped
    finally:
        hook.remove()


class Kept(Callback):
    """Keeps tensors that were made while a step's activations were there, as further steps would have done."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def begin(self, size: int, each: float, device: torch.device) -> None:
        """Keep so many of this size in each step from now on; a fraction adds up."""
        self._each, self._size, self._device, self._due = each, size, device, 0.0

    def on_before_backward(self, *arguments: Any) -> None:
        """Called once in a step."""
        self._due += self._each
        while self._due >= 1:
            self._due -= 1
            self.tensors.append(torch.empty(self._size, dtype=torch.uint8, device=self._device))


def _longest_list(module: LightningModule) -> str:
    """The attribute of a module, or of one in it, whose list holds most bytes of tensors, as a metric's states do."""
    sizes = {
        f"{name}.{key}" if name else key: sum(tensor.nbytes for _, tensor in tensors(value))
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, list)
    }
    most = max(sizes, key=sizes.__getitem__, default="")
    return f"{type(module).__name__}.{most}" if most and sizes[most] else ""


_LEAST_KEPT_BYTES = 1 << 20
"""Of memory that grows from step to step, what an epoch has to add to be worth a further step."""
_MOST_VALIDATED = 64
"""Batches of a validation whose outputs stay in memory that a trial runs at most."""
_KEEPING_STEPS = 8
"""Steps that stand for those of an epoch: where a tensor lies that is kept depends on what else is there with it."""
_MOST_BATCHES = 4 * MAX_BATCHES_WITHOUT_STEP
"""More than any epoch of a dry run gives."""


@dataclass(eq=False)
class ProbeLoader:
    """An iterable of the batches that an epoch of a dry run takes, which says it is longer: no epoch comes to its end.

    Other attributes are those of the loader it `stands_for`.

    Attributes:
        batches: gives what makes each batch of the epoch to come; it is asked for the next when a step has ended.
    """

    length: int
    taken: TrialSteps
    stands_for: Any = None
    batches: Callable[[], Iterator[MakeBatch]] = field(default=lambda: iter(()), init=False)

    def __getattr__(self, name: str) -> Any:
        # The dataset or the sampler, for code of the user's that asks `trainer.train_dataloader`.
        if name.startswith("_") or name == "stands_for":
            raise AttributeError(name)
        return getattr(self.stands_for, name)

    def __len__(self) -> int:
        return max(self.length, _MOST_BATCHES)

    def __iter__(self) -> Iterator[Any]:
        for make_batch in self.batches():
            with self.taken.loading():
                batch = make_batch()
            if self.taken.times_cache_given_back():
                return  # it does not fit, whatever comes
            yield batch


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
        """How many micro-batches of this size there are in one optimizer step."""
        whole = self.split_batch_size
        if whole is None and self.target_batch_size is not None:
            whole = -(-self.target_batch_size // self.num_devices)
        return self.accumulation if whole is None else max(1, -(-whole // batch_size))


@dataclass(eq=False)
class LightningProbe:
    """Tries a size on the trainer as it stands, and leaves no trace: the session puts all back after each try."""

    dry_run: DryRun
    config: TrialConfig
    batches: ProbeBatches
    session: TrialSession
    smallest: int  # a size that runs if any does
    validation: ProbeBatches | None = None  # of the fit
    _validated: bool = field(default=False, init=False)  # whether it was tried beside the smallest batch
    source: ClassVar[str] = "measured"
    unmodelled: ClassVar[tuple[str, ...]] = ()

    def record(self, batch_size: int, shape: Shape) -> tuple[Measurement, Trace | None]:
        """Take the first steps of a size, and record what the GPU's allocator does, for `predict_batch_size`."""
        history = AllocatorHistory(self.session.device)
        seen = self(batch_size, shape, history)
        return seen, history.trace(batch_size) if seen.fits else None

    def __call__(self, batch_size: int, shape: Shape, history: AllocatorHistory | None = None) -> Measurement:
        """Try one size. What the user's code raises that is not about the size comes unchanged, with all put back.

        Args:
            history: records the first steps, which are all then; None for a try.
        """
        config, dry_run, session = self.config, self.dry_run, self.session
        module = dry_run.trainer.lightning_module

        def feed(batches: ProbeBatches, size: int, shape: Shape) -> Feed:
            return Feed(partial(batches.batch, size, shape.seq_len), batches.batches_per_epoch(size), batches.loaders)

        tried = feed(self.batches, batch_size, shape)
        applied = Applied()

        def steps(taken: TrialSteps) -> None:
            if config.attribute is not None:
                applied.undoing.extend(set_attribute(module, config.attribute, batch_size).undoing)
            if config.alone:
                dry_run.evaluate(tried, taken)
            elif config.train is None:

                def made(make: MakeBatch, counts: bool) -> Any:
                    session.stepping.counts = counts
                    return make()

                full = Feed(partial(made, tried.make_batch, True), tried.length, tried.stands_for)
                others = [partial(made, other, False) for other in self.batches.others(batch_size, shape.seq_len)]
                last = [partial(made, other, False) for other in self.batches.last(batch_size, shape.seq_len)]
                validation = None
                if self.validation is not None:
                    validation = feed(self.validation, self.validation.size_beside(batch_size) or 1, Shape())
                dry_run.fit(full, config.micro_batches(batch_size), taken, others, last, validation)
            else:
                size, train_shape, batches = config.train
                full = feed(batches, size, train_shape)
                dry_run.fit(full, config.accumulation, taken, validation=tried, validation_is_tried=True)

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
                spare_bytes=session.spare_bytes if history is None else 0,
                history=history,
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
                    "are stand-ins, callbacks that save or stop are left out, and nothing is logged."
                )
            raise
        finally:
            applied.undo()  # a size in an object that is not among what is put back
        if history is not None:
            return seen
        if dry_run.failed_in_validation and config.train is None and not self._validation_runs(batch_size, shape):
            return self(batch_size, shape)
        if config.stage == "fit" and not config.alone and config.train is None and batch_size > self.smallest:
            seen = session.stepping.compared(seen, lambda: self(self.smallest, shape))
        return seen

    def _validation_runs(self, batch_size: int, shape: Shape) -> bool:
        """Whether the fit's validation runs beside the smallest batch; else sizes are tried without it from now on.

        Called where it ran out of memory beside another.
        """
        not_tried = self.dry_run.not_tried
        if batch_size > self.smallest:
            if not self._validated:
                self(self.smallest, shape)
                self._validated = True
        elif "validation" not in not_tried:
            size = None if self.validation is None else self.validation.size_beside(batch_size)
            not_tried["validation"] = (
                f"the fit's validation, which runs out of memory with its batches of {size} at any size to train with"
            )
            if growth := self.dry_run.validation_growth:
                not_tried["validation"] += f" (its memory grows by {growth}; a copy by .cpu() would not stay there)"
        return "validation" not in not_tried


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
