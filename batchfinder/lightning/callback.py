"""The callback: find the largest batch size on fit start, set it, and make up the rest by accumulation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from pytorch_lightning.callbacks import Callback

from batchfinder.accumulation import AccumulationPlan
from batchfinder.cache import Store
from batchfinder.errors import InvalidValue
from batchfinder.lightning.accumulate import apply_accumulation
from batchfinder.lightning.batches import ProbeBatches
from batchfinder.lightning.checks import check, check_arguments
from batchfinder.lightning.evaluation_start import EvaluationStart
from batchfinder.lightning.feedback import Applied, apply_batch_size, check_loaders, has_size
from batchfinder.lightning.finding import Finding, Found
from batchfinder.lightning.last_window import LastWindow
from batchfinder.lightning.optimizer_setup import OptimizerSetup
from batchfinder.lightning.participants import ahead_of_tuners, participants
from batchfinder.lightning.probe import Setting
from batchfinder.lightning.progress import Progress
from batchfinder.lightning.ran_out import ran_out
from batchfinder.lightning.summary import summary_line
from batchfinder.lightning.trainer_state import capture_data
from batchfinder.outcome import Outcome, Shape
from batchfinder.probing.known import Limits
from batchfinder.probing.memory import memory_of
from batchfinder.search.protocol import check_tolerance
from batchfinder.units import parse_bytes


class BatchFinder(Callback):  # type: ignore[misc, unused-ignore]
    """Finds the largest batch size that trains, sets it, and leaves no other trace.

    Sizes are tried with real steps of the trainer's own loops: this module, its hooks, optimizers, precision and
    strategy. Then everything is put back, down to the random numbers: training is bit for bit what it would be had it
    been started with the sizes found. A second start looks the answer up and tries nothing.

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

    Attributes:
        batch_size: the size training was given; None before.
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
    ) -> None:
        super().__init__()
        check_arguments(target_batch_size, seq_lens, also, headroom, max_batch_size)
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
        if not (predict is None or isinstance(predict, bool)):
            raise InvalidValue("predict", predict, "True, False, or None for on a GPU only")
        self.predict = predict
        self.batch_size: int | None = None
        self.plan: AccumulationPlan | None = None
        self.outcomes: dict[str, dict[int | None, Outcome]] = {}
        self._cache = cache
        self._in_use: dict[str, Found] = {}
        self._applied: dict[str, Applied] = {}
        self._accumulated = Applied()
        self._optimizer_setup = OptimizerSetup()
        self._evaluation_start = EvaluationStart()
        self._last_window = LastWindow()
        self._training: ProbeBatches | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo an earlier run's sizes, and watch for what asks for the loaders before this run's are known."""
        self._in_use = {}
        for earlier in ("fit", "validate") if stage == "fit" else (str(trainer.state.fn.value),):
            self._applied.pop(earlier, Applied()).undo()
        if stage == "fit":
            self.batch_size, self.plan, self._last_window = None, None, LastWindow()
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
        training, validation = self._batches(trainer, pl_module, "fit", trainer.fit_loop), None
        if "validate" in self.also and trainer.enable_validation:
            validation = self._batches(trainer, pl_module, "validate", trainer.fit_loop.epoch_loop.val_loop)
        found = self._serve(trainer, pl_module, "fit", training)
        self.batch_size, self.plan = found.batch_size, found.plan
        if self.plan is not None:
            replaced = trainer.accumulate_grad_batches != 1
            self._accumulated = apply_accumulation(trainer, self.plan)
            if replaced:  # else the summary has said all of it
                for line in self._accumulated:
                    rank_zero_info(f"BatchFinder: {line}.")
            self._last_window = LastWindow(self.plan)
        if validation is not None:
            self._serve(trainer, pl_module, "validate", validation)
        self._training = None  # the data it holds would take room beside the loader's
        self._optimizer_setup.repeat_if_asked(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn if an epoch is too short for the plan."""
        self._last_window.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count samples, for the weight of an epoch's last window."""
        if self.plan is not None:
            self._last_window.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Weigh a micro-batch that is smaller than its window's first."""
        if self.plan is not None:
            self._last_window.on_before_backward(trainer, pl_module, loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Weigh a window that is shorter than the plan's."""
        if self.plan is not None:
            self._last_window.on_before_optimizer_step(trainer, pl_module, optimizer)

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
        """Put the user's own accumulation back, from which the next fit starts."""
        self._accumulated.undo()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lower the record when training runs out of memory at the size that was found."""
        self._optimizer_setup.unwatch(trainer)
        self._accumulated.undo()
        self._training = None
        stage = "validate" if trainer.validating or trainer.sanity_checking else str(trainer.state.fn.value)
        if stage in self._in_use:
            ran_out(self._in_use[stage], stage, exception, trainer.strategy.root_device.type)

    def _serve_alone(self, trainer: Any, pl_module: Any, stage: str, loop: Any) -> None:
        """Serve a stage that runs without a fit, whose loaders have been asked for already."""
        if stage not in self.also or trainer.fast_dev_run:
            return
        check(trainer, None)
        self._serve(trainer, pl_module, stage, self._batches(trainer, pl_module, stage, loop))
        self._evaluation_start.again(loop)

    def _serve(self, trainer: Any, pl_module: Any, stage: str, batches: ProbeBatches) -> Found:
        """Find each length's size, and set that of the longest."""
        started = time.perf_counter()
        memory = memory_of(trainer.strategy.root_device, self.budget)
        free = memory.free_bytes()
        reserve = self.headroom if isinstance(self.headroom, int) else int(self.headroom * free)
        with Progress(trainer) as progress:
            untouched = capture_data(trainer, self)
            try:
                limits = Limits(self._cap(stage, batches), self.tolerance, reserve, self.headroom)
                setting = self._setting(trainer, stage, batches)
                store = self._store()
                finding = Finding(
                    trainer,
                    self,
                    setting,
                    batches,
                    participants(trainer, self, self.probe_callbacks),
                    memory,
                    limits,
                    store,
                    progress.tried,
                    self.predict,
                )
                shapes = [Shape(seq_len) for seq_len in self.seq_lens or (batches.longest_seq_len(),)]
                keys = [None if store is None else finding.key(shape) for shape in shapes]
            finally:
                untouched.restore()
            try:
                founds = [finding.find(shape, key) for shape, key in zip(shapes, keys, strict=True)]
            finally:
                finding.close()
        overhead = (time.perf_counter() - started - sum(found.seconds for found in founds)) / len(founds)
        for found in founds:
            rank_zero_info(summary_line(stage, found.outcome, found.plan, free, reserve, found.seconds + overhead))
        self.outcomes[stage] = {found.outcome.shape.seq_len: found.outcome for found in founds}
        smallest = min(founds, key=lambda found: found.batch_size)
        self._in_use[stage] = smallest
        self._applied[stage] = apply_batch_size(
            trainer, pl_module, stage, smallest.batch_size, self.batch_size_attribute
        )
        return smallest

    def _batches(self, trainer: Any, pl_module: Any, stage: str, loop: Any) -> ProbeBatches:
        """Where a stage's batches come from; loaders that cannot be given a size are refused before any is tried."""
        untouched = capture_data(trainer, self)
        try:
            batches = ProbeBatches(trainer, pl_module, loop._data_source, self.make_batch)
            if batches.loaders is not None:
                trusted = has_size(pl_module, self.batch_size_attribute)
                check_loaders(loop._data_source, batches.loaders, stage, trusted)
        finally:
            untouched.restore()
        return batches

    def _setting(self, trainer: Any, stage: str, batches: ProbeBatches) -> Setting:
        accumulation = trainer.accumulate_grad_batches
        if trainer.state.fn != "fit":
            return Setting(stage, alone=True)
        if stage == "fit":
            self._training = batches
            return Setting(stage, self.target_batch_size, accumulation)
        found, training = self._in_use["fit"], self._training
        train = None if training is None else (found.batch_size, found.outcome.shape, training)
        return Setting(stage, None, accumulation, train)

    def _cap(self, stage: str, batches: ProbeBatches) -> int | None:
        target = self.target_batch_size if stage == "fit" else None
        caps = [cap for cap in (self.max_batch_size, target, batches.dataset_size()) if cap is not None]
        return min(caps, default=None)

    def _store(self) -> Store | None:
        if self._cache is False:
            return None
        if isinstance(self._cache, Store):
            return self._cache
        return Store(None if self._cache is True else self._cache)
