"""The callback: find the largest batch size on fit start, set it, and make up the rest by accumulation.

Training that ran out of memory at a size that was found: the record is lowered, and the user told what to do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from pytorch_lightning.callbacks import Callback

from batchfinder.cache import Store
from batchfinder.data.loss_weights import Weight
from batchfinder.distributed.agreement import Ranks
from batchfinder.errors import BatchFinderError, CacheFailed
from batchfinder.lightning.accumulation import Accumulating
from batchfinder.lightning.batch_size import Applied, apply_batch_size
from batchfinder.lightning.checks import check, check_arguments
from batchfinder.lightning.ddp import ranks_of
from batchfinder.lightning.dry_run_scope import ahead_of_tuners
from batchfinder.lightning.micro_batching.fit import IN_ORDER, MicroBatchingFit, check_split, check_split_arguments
from batchfinder.lightning.probe_batches import ProbeBatches
from batchfinder.lightning.restart import EvaluationRestart, SchedulerSetup
from batchfinder.lightning.stage_tuner import Found, Lengths, Train, batches_of, find_sizes, setting_for
from batchfinder.measure.oom import classify
from batchfinder.measure.tuner import lower
from batchfinder.results import SearchResult, Verdict
from batchfinder.search.base import check_tolerance
from batchfinder.units import parse_bytes


class BatchFinder(Accumulating):
    """Finds the largest batch size that trains, sets it, and leaves no other trace.

    Sizes are tried with real steps of the trainer's own loops: this module, its hooks, optimizers, precision and
    strategy. Then everything is put back, down to the random numbers: training is bit for bit what it would be had it
    been started with the sizes found. A second start looks the answer up and tries nothing. Under DDP all ranks search
    together, and get the size that fits on each of them.

    While sizes are tried, loggers are dummies, nothing is validated or saved, and only those callbacks take part that
    hold tensors or modules (an average of the weights, say), that freeze layers, or that `probe_callbacks` names. Hooks
    of the module run as they do at the beginning of training; what they write outside the process stays.

    Args:
        target_batch_size: samples per optimizer step, made up of micro-batches that fit by accumulation. None to set
            the largest size and leave accumulation as the trainer has it.
        seq_lens: lengths to find sizes for; the loader gets the size of the longest. None for the longest in the data,
            or for data of one fixed shape.
        make_batch: `make_batch(batch_size, seq_len)` returns a batch as a loader would; None to stretch the user's own.
        also: stages besides training to find sizes for: `validate`, `test`, `predict`.
        headroom: memory to leave free: a share of what training could take (a float), or bytes (an int).
        max_batch_size: no larger size is tried.
        tolerance: share of the answer that may be left on the table for fewer tries; 0 for the exact maximum.
        budget: the most memory that may be used, in bytes or as `12GiB`; on a CPU, resident memory of the process.
        cache: where answers are kept (a path, an fsspec URL, a `Store`); None for the default place, False for none.
        batch_size_attribute: what the module, its hparams or the datamodule calls its batch size.
        probe_callbacks: callbacks, or their classes, that take part in the tries.
        predict: whether a search starts from what the simulated step says, recorded in a process of its own that takes
            some seconds and some hundred MiB of the host's memory. None for on a GPU only, where it saves more tries
            than it costs. A step that cannot be recorded (manual optimization, a module that holds what cannot be
            copied to another process) is searched without; the answer is the same, and the log says why at INFO.
        split_batches: let the loader give all samples of an optimizer step, and take each batch apart into
            micro-batches of its lengths' own sizes; see docs/variable.md. Samples are sorted by length where an
            attention mask shows it; `in_order` keeps them as they come. Without a target the loader keeps its size.
        weight: what the loss is a mean over, where batches are split: `samples`, `tokens` (labels that are not -100),
            `next_tokens` (the same for a causal model), `sum`, or a function of a micro-batch that says how much it
            counts.
        recover: where batches are split, run a batch that runs out of memory again, from its start, in smaller
            micro-batches if need be.

    Attributes:
        batch_size: the size training was given; None before, and where the loader keeps one that nobody can see.
        plan: how the target is made up; None without one, or before.
        outcomes: what was found, by stage and length.

    Raises:
        InvalidValue: an argument cannot be meant.

    Example:
        >>> BatchFinder(target_batch_size=1024).target_batch_size
        1024
    """

    def __init__(
        self,
        target_batch_size: int | None = None,
        *,
        seq_lens: Sequence[int] | None = None,
        make_batch: Callable[[int, int | None], Any] | None = None,
        also: Iterable[str] = (),
        headroom: float | int = 0.0,
        max_batch_size: int | None = None,
        tolerance: float = 0.01,
        budget: int | str | None = None,
        cache: str | os.PathLike[str] | Store | bool | None = None,
        batch_size_attribute: str = "batch_size",
        probe_callbacks: Iterable[Callback | type[Callback]] = (),
        predict: bool | None = None,
        split_batches: bool | str = False,
        weight: Weight = "samples",
        recover: bool = True,
    ) -> None:
        super().__init__()
        check_arguments(target_batch_size, seq_lens, also, headroom, max_batch_size, predict)
        check_split_arguments(split_batches, weight, recover)
        check_tolerance(tolerance)
        self.target_batch_size = target_batch_size
        self.seq_lens = None if seq_lens is None else tuple(sorted(seq_lens, reverse=True))
        self.make_batch = make_batch
        self.also = tuple(also)
        self.headroom = headroom
        self.max_batch_size = max_batch_size
        self.tolerance = tolerance
        self.budget = parse_bytes(str(budget), option="budget") if budget is not None else None
        self.batch_size_attribute = batch_size_attribute
        self.probe_callbacks = tuple(probe_callbacks)
        self.predict = predict
        self.batch_size: int | None = None
        self.outcomes: dict[str, dict[int | None, SearchResult]] = {}
        self.cache = cache
        self.split_batches = split_batches
        self.weight = weight
        self.recover = recover
        self._in_use: dict[str, Found] = {}
        self._applied: dict[str, Applied] = {}
        self._optimizer_setup = SchedulerSetup()
        self._evaluation_start = EvaluationRestart()
        self._train: Train | None = None
        self._ranks = Ranks()
        self._split: MicroBatchingFit | None = None

    @property
    def micro_batch_sizes(self) -> dict[int | None, int]:
        """Where batches are split, the largest micro-batch of each length as it is now; empty before, and elsewhere."""
        table = None if self._split is None else self._split.table
        return {} if table is None else table.sizes

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo an earlier run's sizes, and watch for what asks for the loaders before this run's are known."""
        self._in_use = {}
        for earlier in ("fit", "validate") if stage == "fit" else (str(trainer.state.fn.value),):
            self._applied.pop(earlier, Applied()).undo()
        if stage == "fit":
            self.batch_size, self._split = None, None
            self._accumulate(trainer, None)
        if trainer.fast_dev_run:
            return
        if stage == "fit":
            trainer.callbacks = ahead_of_tuners(trainer.callbacks, self)
            self._optimizer_setup.watch(trainer)
        elif stage in self.also:
            self._evaluation_start.watch(getattr(trainer, f"{trainer.state.fn.value}_loop"))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find and set the sizes: the model is on its device, and its loaders are not iterated yet."""
        if trainer.fast_dev_run:
            rank_zero_info("BatchFinder: skipped, since `fast_dev_run` is enabled.")
            return
        check(trainer, self.target_batch_size)
        if self.split_batches:
            check_split(trainer)
            in_order = self.split_batches == IN_ORDER
            self._split = MicroBatchingFit(self.target_batch_size, self.seq_lens, self.weight, self.recover, in_order)
        self._ranks = ranks_of(trainer)
        training, validation = self._batches(trainer, "fit", trainer.fit_loop), None
        if "validate" in self.also and trainer.enable_validation:
            validation = self._batches(trainer, "validate", trainer.fit_loop.epoch_loop.val_loop)
        founds = self._serve(trainer, pl_module, "fit", training)
        if self._split is None:
            found = self._in_use["fit"]
            self.batch_size = found.batch_size
            self._accumulate(trainer, found.plan)
        if validation is not None:
            self._serve(trainer, pl_module, "validate", validation)
        self._train = None  # the data it holds would take room beside the loader's
        self._optimizer_setup.repeat_if_asked(trainer)
        if self._split is not None:
            self._split.begin(trainer, self, training, founds, self._ranks)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Find and set the size of `trainer.validate`."""
        if trainer.state.fn == "validate":
            self._serve_alone(trainer, pl_module, "validate", trainer.validate_loop)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Find and set the size of `trainer.test`."""
        self._serve_alone(trainer, pl_module, "test", trainer.test_loop)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Find and set the size of `trainer.predict`."""
        self._serve_alone(trainer, pl_module, "predict", trainer.predict_loop)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the user's own accumulation and loop back, from which the next fit starts."""
        self._ranks.close()
        self._accumulated.undo()
        if self._split is not None:
            self._split.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lower the record when training runs out of memory at the size that was found."""
        self._ranks.close()
        self._optimizer_setup.unwatch(trainer)
        self._accumulated.undo()
        self._train = None
        stage = "validate" if trainer.validating or trainer.sanity_checking else str(trainer.state.fn.value)
        found = self._in_use.get(stage)
        if self._split is not None:
            found = self._split.in_use() if stage == "fit" else found
            self._split.end()
        if found is not None:
            on_oom(found, stage, exception, trainer.strategy.root_device.type)

    def _batches(self, trainer: Any, stage: str, loop: Any) -> ProbeBatches:
        resized = stage != "fit" or not self.split_batches or self.target_batch_size is not None
        return batches_of(self, trainer, stage, loop, self._ranks, resized)

    def _serve_alone(self, trainer: Any, pl_module: Any, stage: str, loop: Any) -> None:
        """Serve a stage that runs without a fit, whose loaders have been asked for already."""
        if stage not in self.also or trainer.fast_dev_run:
            return
        check(trainer, None)
        self._ranks = ranks_of(trainer)
        self._serve(trainer, pl_module, stage, self._batches(trainer, stage, loop))
        self._evaluation_start.again(loop)

    def _serve(self, trainer: Any, pl_module: Any, stage: str, batches: ProbeBatches) -> list[Found]:
        """Find each length's size, and set that of the longest; where batches are split, their own."""
        split = self._split if trainer.state.fn == "fit" else None
        splits = split is not None and stage == "fit"
        lengths: Lengths = lambda longest: self.seq_lens or (longest,)  # noqa: E731
        if split is not None and splits:
            setting, lengths = split.setting(split.samples(trainer, batches)), split.lengths
            self.batch_size = cap = setting.split_batch_size
        else:
            target = self.target_batch_size if stage == "fit" else None
            cap = None if target is None else -(-target // trainer.world_size)
            setting = setting_for(trainer, stage, target, self._train, split is not None)
        also = [] if split is None else [split.rehearsal(self.batch_size)]
        founds = find_sizes(self, trainer, setting, batches, self._ranks, cap, lengths, also)
        self.outcomes[stage] = {found.outcome.shape.seq_len: found.outcome for found in founds}
        self._in_use[stage] = smallest = min(founds, key=lambda found: found.batch_size)
        if stage == "fit":
            self._train = smallest.batch_size, smallest.outcome.shape, batches
        size = cap if splits else smallest.batch_size
        if size is not None and not (splits and self.target_batch_size is None):
            self._applied[stage] = apply_batch_size(trainer, pl_module, stage, size, self.batch_size_attribute)
        return founds


def on_oom(found: Found, stage: str, exception: BaseException, device: str) -> None:
    """Lower the record where an exception says that memory ran out; say nothing of any other.

    Args:
        found: what the stage ran with.
        stage: `fit`, `validate`, `test` or `predict`.
        exception: what ended the run.
        device: the type of the device.
    """
    if isinstance(exception, BatchFinderError):
        return  # of the next search, which ended before training began
    if classify(exception, device=device) not in (Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY):
        return
    happened = f"BatchFinder: {stage} ran out of memory at batch size {found.batch_size}, which ran when it was tried."
    # A warning of this process, since it may be another rank than the first that ran out.
    warnings.warn(f"{happened} {_lowered(found, str(exception))}", stacklevel=2)


def _lowered(found: Found, message: str) -> str:
    """Lower the record; returns what a person should know of it."""
    advice = "Leave more free with BatchFinder(headroom=0.05)."
    if found.slot is None:
        return advice
    try:
        lowered = lower(found.slot, found.batch_size, message)
    except CacheFailed as error:
        return (
            f"{advice} The cache at {error.url} still says {found.batch_size}, since it cannot be written: "
            f"{error.reason.rstrip('.')}."
        )
    return f"The cache now says {lowered}, which the next start tries before it uses it."
