"""The callback: finds the largest batch size on fit start, sets it, and makes up the rest by accumulation.

Training that runs out of memory at a size that was found: the record is lowered, and the user told what to do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakValueDictionary

from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback

from batchfinder.cache import Store
from batchfinder.cache.record import DamagedRecord, Record, decode, encode
from batchfinder.cache.validity import lower
from batchfinder.data.split import Weight
from batchfinder.errors import BatchFinderError, CacheFailed, InvalidValue
from batchfinder.lightning.accumulation import Accumulating
from batchfinder.lightning.batch_size import (
    STAGES,
    Applied,
    EvaluationRestart,
    SchedulerSetup,
    apply_batch_size,
    check_loaders,
    own_size,
    sizes_by_hook,
    warn_of_old_size,
)
from batchfinder.lightning.compat import (
    add_hyperparameters,
    callbacks_of,
    class_for,
    has_other_processes,
    is_a,
    is_fast_dev_run,
    loader_source,
    running_stage,
)
from batchfinder.lightning.dataloaders import ProbeBatches, check_mode
from batchfinder.lightning.ddp import data_parallel_size, ranks_of
from batchfinder.lightning.dry_run import TrainBatches, TrialConfig, capture_data
from batchfinder.lightning.micro_batching.fit import DryRunMemory, MicroBatchingFit
from batchfinder.lightning.options import IN_ORDER, FinderOptions, check_trainer
from batchfinder.lightning.schedule import ASKED_SIZE, NO_SCHEDULE, read_schedule
from batchfinder.lightning.stage_tuner import StageTuner
from batchfinder.measure.device_memory import Memory, memory_of
from batchfinder.measure.oom import classify
from batchfinder.measure.trial import give_back_cache, prepare_cache
from batchfinder.measure.tuner import TuningResult
from batchfinder.results import SearchResult, Verdict
from batchfinder.snapshot.training_state import restore_on_exit
from batchfinder.units import format_bytes

if TYPE_CHECKING:
    from batchfinder.lightning.compat import StageLoop


_FINDERS: WeakValueDictionary[str, BatchFinder] = WeakValueDictionary()
"""This process's finders by their tokens, which finders in processes that a trainer starts have as well."""


class FoundElsewhere:
    """What a finder found, which is set on the caller's finder where it is unpickled: in the caller's process.

    No dataclass: Lightning copies those, field by field, on their way to the caller.
    """

    def __init__(self, finder: BatchFinder, token: str) -> None:
        self.finder = finder
        self.token = token

    def __reduce__(self) -> tuple[Any, ...]:
        found = {name: getattr(self.finder, name) for name in ("batch_size", "plan", "results")}
        return _set_found, (self.token, found)


def _set_found(token: str, found: dict[str, Any]) -> None:
    if token in _FINDERS:
        vars(_FINDERS[token]).update(found)


class BatchFinder(Accumulating):
    """Finds the largest batch size that trains, sets it, and leaves no other trace.

    Sizes are tried with real steps of the trainer's own loops: this module, its hooks, optimizers, precision and
    strategy. Then everything is put back, down to the random numbers: training is bit for bit what it would be had it
    been started with the sizes found. A second start looks the answer up and certifies it with one try. Under DDP,
    FSDP and ModelParallelStrategy all ranks search together, and get the size that fits on each of them.

    A try takes each kind of step that the fit will have, its validation among them; the log says which. Meanwhile
    loggers are dummies, nothing is saved, and only those callbacks take part that hold tensors or modules (an average
    of the weights, say), that freeze layers, or that `probe_callbacks` names. Hooks of the module run as they do at the
    beginning of training; what they write outside the process stays.

    Args:
        target_batch_size: samples per optimizer step, made up of micro-batches that fit by accumulation. None to set
            the largest size and leave accumulation as the trainer has it.
        goal: `memory` to train with the largest size that fits, or `throughput` with the smallest of those up to it
            that trains at full speed, within 3 % of the best samples per second. Loading data and communication are not
            timed. An evaluation (`also`) gets the largest size all the same.
        exact: meet the target exactly, however small the micro-batch that divides it. Else 254 with 64 fitting is made
            up as 64 x 4 = 256, which the summary says; see `plan_accumulation`.
        seq_lens: lengths to find sizes for; the loader gets the size of the longest. None for the longest in the data,
            or for data of one fixed shape.
        make_batch: `make_batch(batch_size, seq_len)` returns a batch as a loader would; None to stretch the user's own.
        also: stages besides training to find sizes for: `validate`, `test`, `predict`; one of them, or several.
        headroom: memory to leave free: a share of what training could take (0.05 or `5%`), or bytes (an int or `1GiB`).
        min_batch_size: no smaller size is tried: 2 for a BatchNorm1d or a loss over pairs.
        max_batch_size: no larger size is tried.
        multiple_of: every size tried is a multiple of this; the target must be one as well.
        tolerance: share of the answer that may be left on the table for fewer tries; 0 for the exact maximum.
        budget: the most memory that may be used, in bytes or as `12GiB`; on a CPU, resident memory of the process.
        cache: where answers are kept (a path, an fsspec URL, a `Store`); None for the default place, False for none.
        certify: whether an answer from the cache is tried once before it is used.
        batch_size_attribute: what the module, its hparams or the datamodule calls its batch size; with dots
            (`cfg.data.batch_size`) an attribute or key of what is found there.
        probe_callbacks: callbacks, or their classes, that take part in the tries.
        predict: whether a search on a GPU starts from a prediction, by what the allocator did in the first steps of a
            few small batch sizes. Where no prediction can be made the search starts from one sample, and the log says
            why at INFO.
        split_batches: let the loader give all samples of an optimizer step, and split each batch into micro-batches
            of the sizes that fit its lengths; see docs/variable.md. Samples are sorted by length where an
            attention mask shows it; `in_order` keeps them as they come. Without a target the loader keeps its size.
        weight: what the loss is a mean over, where batches are split: `samples`, `tokens` (labels that are not -100),
            `next_tokens` (the same for a causal model), `sum`, or a function of a micro-batch that says how much it
            counts.
        recover: where batches are split, run a batch that runs out of memory again, from its start, in smaller
            micro-batches if need be. None for with a single process only: under DDP it costs each step the overlap of
            the gradients' all-reduce with the backward. An out-of-memory in the optimizer's step ends the run.

    Attributes:
        batch_size: the size training was given; None before, and where the loader keeps one that cannot be seen.
        plan: how the target is made up; None without one, or before.
        options: the arguments.
        results: what was found, by stage and length.

    Raises:
        InvalidValue: names the argument and what it may be.

    Example:
        >>> BatchFinder(target_batch_size=1024, headroom="5%").options.limits().headroom
        0.05
    """

    def __init__(
        self,
        target_batch_size: int | None = None,
        *,
        goal: str = "memory",
        exact: bool = False,
        seq_lens: Sequence[int] | None = None,
        make_batch: Callable[[int, int | None], Any] | None = None,
        also: str | Iterable[str] = (),
        headroom: float | int | str = 0.0,
        min_batch_size: int = 1,
        max_batch_size: int | None = None,
        multiple_of: int = 1,
        tolerance: float = 0.01,
        budget: int | str | None = None,
        cache: str | os.PathLike[str] | Store | bool | None = None,
        certify: bool = True,
        batch_size_attribute: str = "batch_size",
        probe_callbacks: Iterable[Callback | type[Callback]] = (),
        predict: bool = True,
        split_batches: bool | str = False,
        weight: Weight = "samples",
        recover: bool | None = None,
    ) -> None:
        super().__init__()
        self.options = FinderOptions(
            target_batch_size=target_batch_size,
            goal=goal,
            exact=exact,
            seq_lens=None if seq_lens is None else tuple(sorted(seq_lens, reverse=True)),
            make_batch=make_batch,
            also=(also,) if isinstance(also, str) else tuple(also),
            headroom=headroom,
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            multiple_of=multiple_of,
            tolerance=tolerance,
            budget=budget,
            cache=cache,
            certify=certify,
            batch_size_attribute=batch_size_attribute,
            probe_callbacks=tuple(probe_callbacks),
            predict=predict,
            split_batches=split_batches,
            weight=weight,
            recover=recover,
        )
        self.batch_size: int | None = None
        self.results: dict[str, dict[int | None, SearchResult]] = {}
        self._in_use: dict[str, TuningResult] = {}
        self._applied: dict[str, Applied] = {}
        self._scheduler_setup = SchedulerSetup()
        self._evaluation_restart = EvaluationRestart()
        self._train: TrainBatches | None = None
        self._micro_batching: MicroBatchingFit | None = None
        self._records: dict[str, list[Record]] = {}
        self._resumed: dict[str, SearchResult] = {}
        self._finding = False
        self._memory: Memory | None = None  # with the peak of the fit that is running
        self._retries_before = 0
        self._token = uuid4().hex
        _FINDERS[self._token] = self

    def find(
        self,
        trainer: Trainer,
        model: LightningModule,
        dataloaders: Any = None,
        *,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        stage: str = "fit",
    ) -> int | None:
        """Find the sizes without training, and leave trainer, model and data as they are.

        `results` and `plan` say more. With a cache, a fit that has this callback looks the answer up.

        Args:
            trainer: which need not have this callback; it stops where training or the evaluation would begin.
            model: the module.
            dataloaders: the stage's own; None for what the module or the datamodule makes.
            val_dataloaders: those of a fit with `also="validate"`.
            datamodule: as for `trainer.fit`.
            stage: `fit`, `validate`, `test` or `predict`.

        Returns:
            The batch size that training, or the evaluation, would be given.

        Raises:
            InvalidValue: no such stage.
            MisconfigurationException: the trainer runs in processes of its own, or with `fast_dev_run`.
            OutOfMemory: not even the smallest size fits.
            Exception: whatever the user's code raised that is not about the size, unchanged.
        """
        if stage not in STAGES:
            raise InvalidValue("stage", stage, f"one of {', '.join(STAGES)}")
        if is_fast_dev_run(trainer) or has_other_processes(trainer):
            what = "fast_dev_run" if is_fast_dev_run(trainer) else f"strategy={trainer.strategy.launcher}"
            raise MisconfigurationException(
                f"BatchFinder.find cannot search with this trainer's {what}. Make one without it, or "
                "let trainer.fit search: Trainer(callbacks=[finder])."
            )
        if stage != "fit" and val_dataloaders is not None:
            raise InvalidValue(
                "val_dataloaders", val_dataloaders, f"dataloaders= for {stage}; these are of a fit's validation"
            )
        loaders = {"train_dataloaders": dataloaders, "val_dataloaders": val_dataloaders}
        options: dict[str, Any] = loaders if stage == "fit" else {"dataloaders": dataloaders}
        callbacks, loggers = callbacks_of(trainer), trainer.loggers
        self._finding = True
        try:
            if loggers:  # they would begin a run
                trainer.loggers = [class_for(trainer, "loggers.logger", "DummyLogger")()]
            with restore_on_exit():
                if not any(callback is self for callback in callbacks):
                    vars(trainer)["callbacks"] = [self, *callbacks]
                getattr(trainer, stage)(model, datamodule=datamodule, **options)
        finally:
            self._finding = False
            vars(trainer)["callbacks"], trainer.loggers = callbacks, loggers
        for applied in self._applied.values():
            applied.undo()
        return self.batch_size if stage == "fit" else self._in_use[stage].batch_size

    def state_dict(self) -> dict[str, Any]:
        """What was found, as JSON texts, so that a run that goes on from the checkpoint keeps its sizes."""
        records = [encode(record).decode() for found in self._records.values() for record in found]
        return {"batch_size": self.batch_size, "records": records} if records else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint's run had found; the next fit tries it once, and searches only if that fails."""
        for text in state_dict["records"]:
            try:
                record = decode(text.encode())
            except DamagedRecord as damage:
                rank_zero_warn(f"BatchFinder cannot read the checkpoint's batch size: {damage.reason}. It is searched.")
                continue
            # More free memory than then is no reason to search: the size would change in the middle of a run.
            self._resumed[record.key.digest] = replace(record.result, free_bytes=None)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute.

        Raises:
            AttributeError: it is an option, which is read when the callback is made.
        """
        if name in FinderOptions.__dataclass_fields__:
            raise AttributeError(
                f"Setting finder.{name} has no effect: options are checked and kept when a BatchFinder is made. Make "
                f"another one with BatchFinder({name}=...)."
            )
        super().__setattr__(name, value)

    @property
    def micro_batch_sizes(self) -> dict[int | None, int]:
        """Where batches are split, the largest micro-batch of each length as it is now; empty before, and elsewhere."""
        table = None if self._micro_batching is None else self._micro_batching.table
        return {} if table is None else dict(table.sizes)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo an earlier run's sizes, and watch for what asks for the loaders before this run's are known."""
        self._in_use = {}
        running = running_stage(trainer)
        for earlier in ("fit", "validate", "hyperparameters") if stage == "fit" else (running,):
            self._applied.pop(earlier, Applied()).undo()
        if stage == "fit":
            self.batch_size, self._micro_batching = None, None
            self._records, self._resumed = {}, {}
            self._accumulate(trainer, None)
        if is_fast_dev_run(trainer):
            return
        if has_other_processes(trainer):
            # Pickled with what such a fit returns to the caller's process, when it has ended.
            launcher: Any = trainer.strategy.launcher
            collect, found = launcher.get_extra_results, FoundElsewhere(self, self._token)
            vars(launcher)["get_extra_results"] = lambda trainer: {**collect(trainer), "batchfinder": found}
        if stage == "fit":
            # Lightning has put a LearningRateFinder first. A learning rate is right for one batch size: it has to be
            # looked for with the size that will train.
            callbacks = callbacks_of(trainer)
            tuners = [index for index, callback in enumerate(callbacks) if is_a(callback, "LearningRateFinder")]
            if tuners and callbacks.index(self) > tuners[0]:
                others = [callback for callback in callbacks if callback is not self]
                vars(trainer)["callbacks"] = [*others[: tuners[0]], self, *others[tuners[0] :]]
            self._scheduler_setup.watch(trainer)
        elif stage in self.options.also or self._finding:
            self._evaluation_restart.watch(getattr(trainer, f"{running}_loop"))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find and set the sizes: the model is on its device, and its loaders are not iterated yet."""
        if is_fast_dev_run(trainer):
            rank_zero_info("BatchFinder: skipped, since `fast_dev_run` is enabled.")
            return
        options = self.options
        check_trainer(trainer, options)
        if options.split_batches:
            self._micro_batching = MicroBatchingFit(options, data_parallel_size(trainer))
        self._ranks = ranks_of(trainer)
        training, validation = self._probe_batches(trainer, "fit", trainer.fit_loop), None
        if "validate" in options.also and trainer.enable_validation:
            validation = self._probe_batches(trainer, "validate", trainer.fit_loop.epoch_loop.val_loop)
        own = own_size(pl_module, options.batch_size_attribute)
        results = self._tune(trainer, "fit", training)
        if self._micro_batching is None:
            found = self._in_use["fit"]
            self.batch_size = found.batch_size
            self._accumulate(trainer, found.plan)
        if validation is not None:
            self._tune(trainer, "validate", validation)
        self._train = None  # the data it holds would take room beside the loader's
        repeated = self._scheduler_setup.repeat_if_asked(trainer)
        if self._micro_batching is not None:
            self._micro_batching.begin(trainer, self, training, results, self._ranks)
        if self._finding:
            raise class_for(trainer, "utilities.exceptions", "_TunerExitException")
        hooks = ("setup",) if repeated else ("setup", "configure_optimizers")
        warn_of_old_size(pl_module, options.batch_size_attribute, own, hooks)
        found_sizes = {} if self.batch_size is None else {options.batch_size_attribute: self.batch_size}
        if self.plan is not None:
            found_sizes["accumulate_grad_batches"] = self.plan.accumulation
        elif self._micro_batching is not None:
            found_sizes["micro_batch_size"] = results[0].batch_size  # at the longest length
        self._applied["hyperparameters"] = Applied(undoing=[add_hyperparameters(trainer, found_sizes)])
        self._memory = memory_of(trainer.strategy.root_device, options.budget_bytes)
        self._memory.reset_peak()
        self._retries_before = self._memory.retries()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the cache, as trials do: blocks of a sanity check and of a checkpoint would be in the way."""
        super().on_train_start(trainer, pl_module)
        if "fit" in self._in_use:
            prepare_cache(trainer.strategy.root_device)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where there are validations, let each epoch begin with an empty cache, also one that follows none."""
        super().on_train_epoch_start(trainer, pl_module)
        if "fit" in self._in_use and trainer.enable_validation:
            give_back_cache(trainer.strategy.root_device)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the peak of the run with that of the size when it was tried: in a line, the loggers, the cache."""
        memory, self._memory = self._memory, None
        found = self._in_use.get("fit")
        if memory is None or found is None or trainer.global_step == 0:
            return
        allocated, reserved = memory.peaks()
        if reserved is None:
            return
        size = found.batch_size
        seen = {t.batch_size: t.measurement.peak_reserved_bytes for t in (*found.earlier_trials, *found.result.trials)}
        said = f"{format_bytes(reserved)} {'resident' if allocated is None else 'reserved'}"
        if allocated is not None:
            said += f" and {format_bytes(allocated)} allocated"
        tried = seen.get(size)
        if tried is not None:
            said += f"; {format_bytes(tried)} when it was tried"
        retries = memory.retries() - self._retries_before
        if retries:
            said += f"; the allocator gave its cache back {retries} time{'s' * (retries != 1)} (num_alloc_retries)"
        rank_zero_info(f"BatchFinder: the peak of training with batch size {size} was {said}.")
        metrics = {"peak_reserved_bytes": reserved, "peak_allocated_bytes": allocated}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(
                {f"batchfinder/{name}": float(value) for name, value in metrics.items() if value is not None},
                step=trainer.global_step,
            )
        if found.entry is not None and trainer.is_global_zero:
            with suppress(CacheFailed):  # of which the search has warned
                known = found.entry.get()
                if known is not None and known.max_batch_size == found.result.max_batch_size:
                    found.entry.put(replace(known, trained=(size, allocated, reserved)))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find and set the size of `trainer.validate`, `test` or `predict`; its loaders have been asked for already."""
        stage = running_stage(trainer)
        if stage == "fit" and "fit" in self._in_use:
            # Training steps have left blocks that would be in the way. Trials empty the cache here, too.
            give_back_cache(trainer.strategy.root_device)
        if stage == "fit" or is_fast_dev_run(trainer) or not (stage in self.options.also or self._finding):
            return
        check_trainer(trainer, self.options)
        self._ranks = ranks_of(trainer)
        loop = getattr(trainer, f"{stage}_loop")
        self._tune(trainer, stage, self._probe_batches(trainer, stage, loop))
        self._evaluation_restart.restart(loop)
        if self._finding:
            raise class_for(trainer, "utilities.exceptions", "_TunerExitException")

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let training go on with an empty cache, as it did in trials."""
        if running_stage(trainer) == "fit" and "fit" in self._in_use:
            give_back_cache(trainer.strategy.root_device)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the user's own accumulation and loop back, from which the next fit starts."""
        self._ranks.close()
        self._accumulated.undo()
        if self._micro_batching is not None:
            self._micro_batching.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lower the record when training runs out of memory at the size that was found."""
        self._ranks.close()
        self._scheduler_setup.unwatch(trainer)
        self._accumulated.undo()
        self._train = None
        stage = "validate" if trainer.validating or trainer.sanity_checking else running_stage(trainer)
        found, recovers = self._in_use.get(stage), False
        if self._micro_batching is not None:
            if stage == "fit":
                found, recovers = self._micro_batching.in_use(), self._micro_batching.recovers
            self._micro_batching.end()
        if found is None or isinstance(exception, BatchFinderError):  # of the next search, before training began
            return
        verdict = classify(exception, device=trainer.strategy.root_device.type)
        if verdict not in (Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY):
            return
        size, advice = found.batch_size, "Leave more free with BatchFinder(headroom=0.05)."
        happened = f"BatchFinder: {stage} ran out of memory at batch size {size}, which ran when it was tried."
        if recovers:
            happened += (
                " It did so outside forward and backward, which alone are run again; perhaps in optimizer.step()."
            )
        if found.entry is not None:
            try:
                lowered = lower(found.entry, size, str(exception))
                advice = f"The cache now says {lowered}, which the next start tries before it uses it."
            except CacheFailed as error:
                advice += (
                    f" The cache at {error.url} still says {size}, since it cannot be written: "
                    f"{error.reason.rstrip('.')}."
                )
        # A warning of this process, since it may be another rank than the first that ran out.
        warnings.warn(f"{happened} {advice}", stacklevel=2)

    def _probe_batches(self, trainer: Trainer, stage: str, loop: StageLoop) -> ProbeBatches:
        """Where a stage's batches come from; loaders that cannot be given a size are refused before any is tried."""
        options, source, module = self.options, loader_source(loop), trainer.lightning_module
        resized = stage != "fit" or not options.split_batches or options.target_batch_size is not None
        before = capture_data(trainer, self)
        try:
            by_hook = partial(sizes_by_hook, source, module, options.batch_size_attribute)
            uses_hook = stage == "fit" and resized and source.is_module()
            batches = ProbeBatches(trainer, module, source, options.make_batch, by_hook if uses_hook else None)
            loaders = self._ranks.barrier_call(lambda: batches.loaders, "made its loaders")
            if stage == "fit":
                check_mode(loaders)
            if loaders is not None and resized:
                check_loaders(source, loaders, stage, module, options.batch_size_attribute)
        finally:
            before.restore()
        return batches

    def _validation_of_fit(self, trainer: Trainer, sees_size: bool) -> ProbeBatches | None:
        """Where the fit's own validation has its batches from; None for nowhere.

        Args:
            sees_size: whether its hook will see the size that is found, of which it may make theirs.
        """
        module, source = trainer.lightning_module, loader_source(trainer.fit_loop.epoch_loop.val_loop)
        batches = ProbeBatches(trainer, module, source)
        if sees_size and source.is_module():
            batches.sizes_beside = partial(sizes_by_hook, source, module, self.options.batch_size_attribute)
        before, size, reason = capture_data(trainer, self), None, "its loader does not say how large its batches are"
        try:
            batches.batch(1)
            size = batches.own_batch_size
            if {batches.size_beside(asked) for asked in (ASKED_SIZE, 2 * ASKED_SIZE)} == {size}:
                batches.sizes_beside = None  # it is its own
        except Exception as error:  # it is Lightning's to raise when it gets there
            reason = f"{type(error).__name__}: {error}"
            batches.sizes_beside = None
        finally:
            before.restore()
        if size is None:
            rank_zero_info(f"BatchFinder: the fit's validation is not tried: {reason}.")
        return None if None in self._ranks.all_gather(size) else batches

    def _tune(self, trainer: Trainer, stage: str, batches: ProbeBatches) -> list[TuningResult]:
        """Find each length's size, and set that of the longest; where batches are split, the whole batch's."""
        options = self.options
        micro_batching = self._micro_batching if trainer.state.fn == "fit" else None
        schedule, validation = NO_SCHEDULE, None
        if trainer.state.fn == "fit":
            if stage == "fit" and trainer.enable_validation and "validate" not in options.also:
                validation = self._validation_of_fit(trainer, sees_size=micro_batching is None)
            own, by_hook = None, None
            if validation is not None:
                own = validation.own_batch_size
                by_hook = None if validation.sizes_beside is None else validation.size_beside(ASKED_SIZE)
            schedule = read_schedule(trainer, own, by_hook)
        accumulation = schedule.accumulation if micro_batching is None else 2
        if trainer.state.fn != "fit":
            config = TrialConfig(stage, alone=True)
        elif stage != "fit":
            config = TrialConfig(stage, accumulation=accumulation, train=self._train)
        elif micro_batching is None:
            config = TrialConfig(
                stage,
                options.target_batch_size,
                accumulation,
                num_devices=data_parallel_size(trainer),
                attribute=options.batch_size_attribute,
            )
        else:
            self.batch_size = micro_batching.samples(batches)
            config = TrialConfig(stage, accumulation=accumulation, split_batch_size=self.batch_size)
        extra = []
        if micro_batching is not None:
            extra = [DryRunMemory(self.batch_size, micro_batching.recovers, options.split_batches == IN_ORDER)]
        tuner = StageTuner(trainer, self, options, config, batches, self._ranks, extra, schedule, validation)
        splits, longest = micro_batching is not None and stage == "fit", tuner.longest_seq_len
        lengths = micro_batching.lengths(longest) if micro_batching is not None and splits else None
        results = tuner.tune(lengths or options.seq_lens or (longest,), self._resumed)
        self._records[stage] = tuner.records
        self.results[stage] = {found.result.shape.seq_len: found.result for found in results}
        self._in_use[stage] = smallest = min(results, key=lambda found: found.batch_size)
        if stage == "fit":
            self._train = TrainBatches(smallest.batch_size, smallest.result.shape, batches)
        size: int | None = smallest.batch_size
        if splits:
            size = None if options.target_batch_size is None else self.batch_size
        if size is not None:
            attribute = options.batch_size_attribute
            self._applied[stage] = apply_batch_size(trainer, trainer.lightning_module, stage, size, attribute)
            if stage == "fit":
                _tell_left_out(batches, size)
        return results


def _tell_left_out(batches: ProbeBatches, batch_size: int) -> None:
    """Warn where `drop_last` leaves out a good part of each epoch, and name a size that leaves out next to nothing."""
    left_out, samples = batches.left_out(batch_size), batches.dataset_size()
    if samples is None or left_out <= _MOST_LEFT_OUT * samples:
        return
    smaller = samples // (samples // batch_size + 1)
    rank_zero_warn(
        f"BatchFinder: with drop_last, batch size {batch_size} leaves {left_out} of {samples} samples out of each "
        f"epoch. Pass max_batch_size={smaller} to leave out {batches.left_out(smaller)}, or drop_last=False to the "
        "loader."
    )


_MOST_LEFT_OUT = 0.1
"""Share of an epoch's samples that `drop_last` may leave out unsaid."""
