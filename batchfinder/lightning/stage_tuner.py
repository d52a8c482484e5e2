"""One stage of one trainer: its data looked at, its sizes found for each length, and what was found said."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.cache.record import Record
from batchfinder.cache.store import ResultEntry
from batchfinder.distributed.agreement import AgreedEntry, AgreedProbe, Ranks, agree_on_key, predict_on_each
from batchfinder.errors import CacheFailed, InvalidValue
from batchfinder.lightning.compat import (
    compiler_context,
    detects_anomaly,
    is_a,
    package_of,
    progress_bar_console,
)
from batchfinder.lightning.dataloaders import ProbeBatches
from batchfinder.lightning.ddp import begin_trials, end_trials
from batchfinder.lightning.dry_run import DryRun, LightningProbe, TrialConfig, active_callbacks, capture, capture_data
from batchfinder.lightning.options import FinderOptions
from batchfinder.lightning.schedule import ASKED_SIZE, NO_SCHEDULE, Schedule
from batchfinder.measure.device_memory import SEGMENTS_EXPAND, Memory, expand_segments, memory_of
from batchfinder.measure.key_fields import describe_batch, describe_sharding, measured_key_fields, versions
from batchfinder.measure.trial import TrialSession
from batchfinder.measure.tuner import SearchLimits, Tuner, TuningResult, spare_bytes
from batchfinder.models.fingerprint import fingerprint_module, fingerprint_optimizer
from batchfinder.probe import Probe
from batchfinder.results import SearchResult, Shape, Trial
from batchfinder.search import Bounds, Prediction
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.units import format_bytes


@dataclass(frozen=True)
class ResumedEntry:
    """The place of a result that a checkpoint has too: a run that goes on from it keeps the size that it had.

    Attributes:
        entry: where the result is cached; None without a cache.
        resumed: the checkpoint's.
    """

    entry: ResultEntry | None
    resumed: SearchResult

    def get(self) -> SearchResult | None:
        """The checkpoint's result; the cached one where training has run out of memory since."""
        cached = None
        with suppress(CacheFailed):
            cached = None if self.entry is None else self.entry.get()
        lowered = cached is not None and cached.measurement is None
        return cached if lowered and cached.max_batch_size < self.resumed.max_batch_size else self.resumed  # type: ignore[union-attr]

    def put(self, outcome: SearchResult) -> None:
        """Cache a result."""
        if self.entry is not None:
            self.entry.put(outcome)


class StageTuner:
    """Finds the sizes of one stage.

    Args:
        trainer: set up, with its model on the device.
        finder: the callback that asks, which takes no part.
        options: what the callback was asked for.
        config: what is tried.
        batches: where batches come from.
        ranks: the trainer's processes, all of which search.
        extra_callbacks: callbacks that take part in the tries besides the user's.
        schedule: what a fit does besides full batches.
        validation: where the batches of the fit's own validation come from; None for none.

    Attributes:
        records: what was found and for which question, as a checkpoint keeps it.
        longest_seq_len: the longest length in the data of any rank; None for data without lengths.
    """

    def __init__(
        self,
        trainer: Trainer,
        finder: Callback,
        options: FinderOptions,
        config: TrialConfig,
        batches: ProbeBatches,
        ranks: Ranks,
        extra_callbacks: Sequence[Callback] = (),
        schedule: Schedule = NO_SCHEDULE,
        validation: ProbeBatches | None = None,
    ) -> None:
        self._schedule, self._validation = schedule, validation
        self._started = time.perf_counter()
        self._trainer = trainer
        self._finder = finder
        self._options = options
        self._config = config
        self._batches = batches
        self._ranks = ranks
        self.records: list[Record] = []
        self._device = trainer.strategy.root_device
        self._memory = memory_of(self._device, options.budget_bytes)
        spares = self._device.type == "cuda" and config.stage == "fit" and config.train is None
        before = capture_data(trainer, finder)
        try:
            size, length, varies = ranks.barrier_call(
                lambda: (
                    batches.largest_batch(),
                    None if options.seq_lens else batches.longest_seq_len,
                    spares and batches.varies(),
                ),
                "looked at the data",
            )
            caps = [cap for cap in (options.max_batch_size, config.split_batch_size, size) if cap is not None]
            own = min(caps, default=None), length, varies
            all_caps, lengths, all_vary = zip(*ranks.all_gather(own), strict=True)
        finally:
            before.restore()
        cap = min((cap for cap in all_caps if cap is not None), default=None)
        smallest = options.limits().bounds.first
        if cap is not None and cap < smallest:
            if config.stage == "fit":
                name = "min_batch_size" if options.min_batch_size > cap else "multiple_of"
                expected = f"at most {cap}, the samples of an epoch on one device"
                if cap == batches.largest_batch() != batches.dataset_size():
                    expected += (
                        ", over the batches that limit_train_batches, overfit_batches or val_check_interval ask for"
                    )
                raise InvalidValue(name, getattr(options, name), expected)
            cap = smallest
        self.longest_seq_len: int | None = max((length for length in lengths if length is not None), default=None)
        self._callbacks = active_callbacks(trainer, finder, options.probe_callbacks, extra_callbacks)
        self._limits = options.limits(
            max_batch_size=cap,
            target_batch_size=config.target_batch_size,
            num_devices=config.num_devices,
            goal=options.goal if config.stage == "fit" else "memory",
            accumulation=config.accumulation,
        ).with_memory(self._free_bytes())
        self._session = TrialSession(
            self._memory, self._device, self._limits.reserve_bytes, lambda: capture(trainer, finder)
        )
        self._varies = any(all_vary)
        if self._varies and expand_segments(self._device):
            rank_zero_info(f"BatchFinder: {SEGMENTS_EXPAND}")
        self._session.spare_bytes = spare_bytes(self._memory.free_bytes(), self._varies) if spares else 0
        self._probe: Probe | None = None
        self._own_probe: LightningProbe | None = None  # of this rank
        self._dry_run: DryRun | None = None
        self._predicted: Prediction | None = None

    def tune(
        self, seq_lens: Sequence[int | None], resumed: Mapping[str, SearchResult] = MappingProxyType({})
    ) -> list[TuningResult]:
        """Find the size of each length, the longest first, and say what was found.

        Where batches are split, lengths below one at which a batch fits whole are left out.

        Args:
            seq_lens: the lengths; None for data without.
            resumed: results of the checkpoint that a fit goes on from, by their keys' digests.

        Raises:
            OutOfMemory: not even one sample fits.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
            RankFailed: it was raised on another rank.
            RankLost: another rank has ended, or does not answer within the time limit.
        """
        shapes = [Shape(seq_len) for seq_len in seq_lens]
        keys = self._keys(shapes)
        store, stage = self._options.store, self._config.stage
        name = type(self._trainer.lightning_module).__name__
        if resumed and not any(key.digest in resumed for key in keys):
            rank_zero_info(
                f"BatchFinder: the checkpoint's batch size to {stage} with was found for another device, model, data, "
                "option or version, and is not used."
            )
        results: list[TuningResult] = []
        whole = self._config.split_batch_size
        with shown_trials(self._trainer) as on_trial, self._session:
            tuner = Tuner(
                self._free_bytes,
                self._limits,
                self._open_probe,
                hint=self._predict,
                on_trial=on_trial,
                held_bytes=self._memory.held_bytes(),
                time_steps=self._session.time_steps,
                warn=lambda error: rank_zero_warn(
                    f"BatchFinder cannot use the cache at {error.url}: {error.reason.rstrip('.')}. Results of this run "
                    "are not cached. Pass BatchFinder(cache=...) a place that can be written, or cache=False."
                ),
            )
            try:
                for shape, key in zip(shapes, keys, strict=True):
                    entry = None if store is None else store.entry(key, name)
                    kept = ResumedEntry(entry, resumed[key.digest]) if key.digest in resumed else entry
                    longer = results[-1].result if results and whole else None
                    if longer is not None and longer.shape.seq_len is not None and shape.seq_len is not None:
                        # As many tokens; more may fit, where attention took its part of the memory.
                        tokens = longer.max_batch_size * longer.shape.seq_len
                        self._predicted = Prediction(tokens // shape.seq_len)
                    elif self._config.train is not None:
                        # An evaluation takes less than a step of as many; below that the peak is the step's.
                        self._predicted = Prediction(2 * self._config.train.batch_size)
                    else:
                        self._predicted = None
                    # While ranks agree the first one alone reads and writes; on its own any of them may lower a record.
                    agreed = kept if kept is None or self._ranks.size == 1 else AgreedEntry(kept, self._ranks)
                    found = replace(tuner.find(shape, agreed), entry=entry)
                    found.raise_if_nothing_fits()
                    whole_result = replace(
                        found.result, source="measured", trials=(*found.earlier_trials, *found.result.trials)
                    )
                    self.records.append(Record(key, whole_result, datetime.now(UTC).replace(microsecond=0), name))
                    results.append(found)
                    if whole is not None and found.batch_size >= whole:
                        break
            finally:
                if self._probe is not None:
                    self._probe = self._own_probe = None
                    end_trials(self._trainer)
        overhead = (time.perf_counter() - self._started - sum(found.seconds for found in results)) / len(results)
        results = [replace(found, seconds=found.seconds + overhead) for found in results]
        for index, (found, record) in enumerate(zip(results, self.records, strict=True)):
            said = str(found)
            if found.result.source == "cache" and record.key.digest in resumed:
                said = said.replace("from the cache", "from the checkpoint")
                results[index] = replace(found, result=replace(found.result, source="checkpoint"))
            rank_zero_info(f"BatchFinder: {stage} {said}.")
        if self._dry_run is not None and self._session.spare_bytes:
            left = f"tries left {format_bytes(self._session.spare_bytes)} free"
            if not self._varies:
                said = f"{left}: expandable segments grow a little for some epochs."
            else:
                said = f"samples differ in length, so {left}: in another order the lengths take more."
                if not AllocatorSettings.from_environment().expandable_segments:
                    said += (
                        " Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and the cache falls into fewer pieces: "
                        "larger batches fit."
                    )
            rank_zero_info(f"BatchFinder: {said}")
        if self._dry_run is not None and self._dry_run.growth:
            rank_zero_info(
                f"BatchFinder: memory grows by {self._dry_run.growth}; sizes were tried with what it comes to in an "
                "epoch, where its length is known."
            )
        growth = "" if self._dry_run is None else self._dry_run.validation_growth
        if self._dry_run is not None and growth and "validation" not in self._dry_run.not_tried:
            rank_zero_info(
                f"BatchFinder: the validation's memory grows by {growth}; sizes were tried with a whole one."
            )
        for not_tried in () if self._dry_run is None else self._dry_run.not_tried.values():
            rank_zero_warn(f"BatchFinder: sizes were tried without {not_tried}. Leave room for it with headroom=.")
        return results

    def _keys(self, shapes: Sequence[Shape]) -> list[CacheKey]:
        """The name of each shape's question, for all ranks."""
        keys = []
        before = capture_data(self._trainer, self._finder)
        try:
            for shape in shapes:
                key = agree_on_key(
                    lambda shape=shape: make_key(  # type: ignore[misc]
                        self._trainer,
                        self._config,
                        shape,
                        self._batches.batch(self._limits.bounds.first, shape.seq_len),
                        self._memory,
                        self._limits,
                        self._callbacks.active,
                        self._schedule,
                    ),
                    self._ranks,
                )
                keys.append(key)
        finally:
            before.restore()
        return keys

    def _free_bytes(self) -> int:
        """What training could take on the rank that has the least."""
        return self._ranks.all_reduce_min(self._memory.free_bytes())[0]

    def _open_probe(self) -> tuple[Probe, int]:
        """The probe, made when it is first needed: it copies the training state."""
        if self._probe is None:
            begin_trials(self._trainer)
            try:
                self._ranks.barrier_call(self._session.open, "got ready to try sizes")
            except BaseException:
                end_trials(self._trainer)
                raise
            if self._config.stage == "fit":
                rank_zero_info(f"BatchFinder: each size is tried with {self._schedule}.")
            self._dry_run = DryRun(self._trainer, self._callbacks, self._memory, self._schedule)
            smallest = self._limits.bounds.after(1)  # one sample may raise where two run
            self._own_probe = LightningProbe(
                self._dry_run,
                self._config,
                self._batches,
                self._session,
                smallest,
                self._validation,
            )
            own = self._own_probe
            self._probe = own if self._ranks.size == 1 else AgreedProbe(own, self._ranks)
        return self._probe, self._ranks.all_reduce_min(self._session.max_peak_bytes())[0]

    def _predict(self, shape: Shape, bounds: Bounds, max_peak_bytes: int) -> Prediction | None:
        """What is predicted already, or from recorded steps."""
        if self._predicted is not None:
            return self._predicted
        if self._own_probe is None or not self._options.predict:
            return None
        record = partial(self._own_probe.record, shape=shape)
        return predict_on_each(self._ranks, self._session, record, bounds, max_peak_bytes, self._later_steps)

    def _later_steps(self, batch_size: int) -> list[int | None]:
        """What a trial of a fit takes after its first two steps; nothing else for a stage of its own."""
        if self._config.stage != "fit":
            return []
        last, batches = self._batches.last_batch_size(batch_size), self._batches.batches_per_epoch(batch_size)
        return self._schedule.later_steps(batch_size, last, batches)


@contextmanager
def shown_trials(trainer: Trainer) -> Iterator[Callable[[Trial], None]]:
    """Gives a function that shows one more try as the trainer's progress bar would; nothing before the first."""
    bar = trainer.progress_bar_callback
    shown = bar is not None and trainer.is_global_zero and not getattr(bar, "is_disabled", False)
    tries = 0
    with ExitStack() as stack:
        status: Any = None

        def on_trial(trial: Trial) -> None:
            nonlocal status, tries
            tries += 1
            outcome = "fits" if trial.fits else "does not fit"
            text = f"BatchFinder: batch size {trial.batch_size} {outcome} ({tries} {'try' if tries == 1 else 'tries'})"
            if shown and is_a(bar, "RichProgressBar"):
                from rich.console import Console
                from rich.status import Status

                if status is None:  # written where the user wants Rich to write
                    status = stack.enter_context(Status(text, console=Console(**progress_bar_console(bar))))
                status.update(text)
            elif shown and is_a(bar, "TQDMProgressBar"):
                from tqdm.auto import tqdm  # type: ignore[import-untyped]

                if status is None:
                    status = stack.enter_context(tqdm(leave=False, bar_format="{desc}"))
                status.set_description_str(text)

        yield on_trial


def make_key(
    trainer: Trainer,
    config: TrialConfig,
    shape: Shape,
    sample: Any,
    memory: Memory,
    limits: SearchLimits,
    callbacks: Iterable[Callback],
    schedule: Schedule = NO_SCHEDULE,
) -> CacheKey:
    """Name everything that changes the answer.

    `sample` is a batch of one sample: the data's own shapes and types, which the model's code may not tell. `callbacks`
    are those that take part in the tries.
    """
    module = trainer.lightning_module
    optimizers = [] if config.alone else trainer.optimizers
    train = config.train
    # Where a hook makes it of the size that is found, what it is now says nothing.
    by_hook = schedule.validation_by_hook
    validation = schedule.validation_batch_size if by_hook is None else f"{by_hook} beside {ASKED_SIZE}"
    extra: dict[str, Json] = {
        "sample": describe_batch(sample),
        "stage": [config.stage, config.alone],
        "target": config.target_batch_size,
        "split": config.split_batch_size,
        "train": None if train is None else [train.batch_size, train.shape.seq_len],
        "schedule": [validation, str(schedule.validation_interval), *schedule.later_epochs],
        "headroom": limits.headroom,
        "strategy": type(trainer.strategy).__name__,
        "automatic_optimization": module.automatic_optimization,
        "clip": bool(trainer.gradient_clip_val) and str(trainer.gradient_clip_algorithm),
        "detect_anomaly": detects_anomaly(trainer),
        "callbacks": sorted(type(callback).__qualname__ for callback in callbacks),
        "threads": torch.get_num_threads() if trainer.strategy.root_device.type == "cpu" else None,
        "compiled": compiler_context(module) is not None,
        **describe_sharding([module]),
    }
    return CacheKey(
        **measured_key_fields(memory, limits, trainer.strategy.root_device, shape, optimizers),
        model=fingerprint_module(module),
        mode="train" if config.stage == "fit" else "inference",
        precision=str(trainer.precision),
        optimizer_options={str(index): fingerprint_optimizer(optimizer) for index, optimizer in enumerate(optimizers)},
        attention="",
        gradient_checkpointing=False,
        accumulation=config.accumulation,
        versions=versions(package_of(trainer).partition(".")[0].replace("_", "-")),
        extra=extra,
    )
