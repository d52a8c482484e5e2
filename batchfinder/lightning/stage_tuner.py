"""One stage of one trainer: where its answers are kept, how its sizes are tried, and what a search starts from.

One stage served: its batches looked at, its sizes found for each length, and what was found said.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from batchfinder.cache import CacheKey, Store
from batchfinder.cache.key import Json
from batchfinder.distributed.agreement import AgreedEntry, AgreedProbe, Ranks
from batchfinder.errors import CacheFailed
from batchfinder.lightning.batch_size import check_loaders, has_size
from batchfinder.lightning.cache_key import make_key
from batchfinder.lightning.ddp import agreed_data, agreed_memory, forget_used_parameters
from batchfinder.lightning.dry_run import Batches, DryRun, LightningProbe, Setting
from batchfinder.lightning.dry_run_scope import active_callbacks, capture, capture_data, left_out
from batchfinder.lightning.prediction import SECONDS, hint, simulated_device
from batchfinder.lightning.probe_batches import ProbeBatches
from batchfinder.lightning.progress import Progress, summary_line
from batchfinder.measure.cleanup import clear
from batchfinder.measure.device_memory import Memory, memory_of
from batchfinder.measure.tuner import SearchLimits, Tuner, TuningResult
from batchfinder.probe import Probe
from batchfinder.results import Shape, Trial

_FEW = 8
"""Up to this cap no search takes as long as a hint."""

Found = TuningResult


class StageTuner:
    """Finds the sizes of one stage.

    Args:
        trainer: set up, with its model on the device.
        finder: the callback that asks, which takes no part.
        setting: what is tried.
        batches: where batches come from.
        callbacks: those that take part, and those of them that have not seen the start yet.
        memory: the device's memory.
        limits: what bounds the search.
        store: where answers are kept; None to keep none.
        on_trial: called after each probe.
        predict: whether a search starts from the simulated step's answer; None for on a GPU only.
        ranks: the trainer's processes, all of which search; None for this one alone.

    Attributes:
        predicted: a guess of the next answer, from another length's; None to ask for a hint.
    """

    def __init__(
        self,
        trainer: Any,
        finder: Any,
        setting: Setting,
        batches: Batches,
        callbacks: tuple[list[Any], list[Any]],
        memory: Memory,
        limits: SearchLimits,
        store: Store | None,
        on_trial: Callable[[Trial], object],
        predict: bool | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._trainer = trainer
        self._finder = finder
        self._setting = setting
        self._batches = batches
        self._callbacks = callbacks
        self._memory = memory
        self._limits = limits
        self.predicted: int | None = None
        self._store = store
        self._predict = self.device.type == "cuda" if predict is None else predict
        self._ranks = Ranks() if ranks is None else ranks
        self._probe: Probe | None = None
        self._held_bytes = 0
        self._froze = False
        self._answering = Tuner(
            memory,
            limits,
            self._prober,
            setting.target_batch_size,
            on_trial=on_trial,
            hint=self._hint,
            num_devices=setting.num_devices,
            warn=_warn,
        )

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self._trainer.strategy.root_device
        return device

    def key(self, shape: Shape) -> CacheKey:
        """Where the answer for a shape is kept: for several ranks the first one's place, named for all of them.

        Args:
            shape: one sample's shape.
        """
        keys = self._ranks.each(lambda: self._own_key(shape), "looked at the model and its data")
        if len(keys) == 1:
            return keys[0]
        others: list[Json] = [*sorted({key.digest for key in keys} - {keys[0].digest})]
        return replace(keys[0], extra={**keys[0].extra, "ranks": [len(keys), *others]})

    def find(self, shape: Shape, key: CacheKey | None) -> Found:
        """Look the answer up, and search where there is none or it no longer holds.

        Args:
            shape: one sample's shape.
            key: from `key`; None without a cache.

        Raises:
            OutOfMemory: not even one sample fits.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
            RankFailed: it was raised on another rank.
            RankLost: another rank has ended, or does not answer within the time limit.
        """
        name = type(self._trainer.lightning_module).__name__
        slot = None if self._store is None or key is None else self._store.slot(key, name)
        if slot is None or self._ranks.size == 1:
            return self._answering.find(shape, slot)
        return replace(self._answering.find(shape, AgreedEntry(slot, self._ranks)), slot=slot)

    def close(self) -> None:
        """Let go of the copy of the training state, of the data, and of all memory that is not in use."""
        del self._answering  # it knows this object: the data would be held until the next garbage collection
        if self._probe is None:
            return
        self._probe = None
        forget_used_parameters(self._trainer)
        if self._froze:
            gc.unfreeze()
        clear(self.device)

    def _own_key(self, shape: Shape) -> CacheKey:
        sample = self._batches.batch(1, shape.seq_len)
        return make_key(self._trainer, self._setting, shape, sample, self._memory, self._limits, self._callbacks[0])

    def _hint(self, shape: Shape, usable_bytes: int) -> int | None:
        """What is predicted, or the simulated step's answer; None where that would cost more than it saves."""
        cap = self._limits.cap
        if self.predicted is not None:
            return self.predicted
        if not self._predict or (cap is not None and cap <= _FEW):
            return None
        return self._ranks.each(lambda: self._first_ranks_hint(shape, usable_bytes), "asked for a hint")[0]

    def _first_ranks_hint(self, shape: Shape, usable_bytes: int) -> int | None:
        """One process that records is enough, and the others' memory is better spent."""
        if self._ranks.rank > 0:
            return None
        device = simulated_device(self.device, self._memory, usable_bytes, self._trainer.lightning_module)
        host, cap = self.device.type == "cpu", self._limits.cap
        # The others wait meanwhile, for as long as a meeting may take.
        waiting = {"seconds": min(SECONDS, self._ranks.seconds / 2)} if self._ranks.size > 1 else {}
        return hint(self._trainer, self._finder, self._setting, self._batches, shape, device, host, cap, **waiting)

    def _prober(self, shape: Shape) -> tuple[Probe, int]:
        """The probe, made when it is first needed: it copies the training state."""
        if self._probe is None:
            probe = self._ranks.together(lambda: self._own_probe(shape), "got ready to try sizes")
            self._probe = probe if self._ranks.size == 1 else AgreedProbe(probe, self._ranks)
        return self._probe, self._held_bytes

    def _own_probe(self, shape: Shape) -> LightningProbe:
        clear(self.device)
        if gc.get_freeze_count() == 0:
            # A collection after each try then looks at what the tries made, and at nothing else: 250 ms less.
            gc.freeze()
            self._froze = True
        before = self._memory.held_bytes()
        state = capture(self._trainer, self._finder)
        self._held_bytes = min(state.nbytes, max(0, self._memory.held_bytes() - before))
        rehearsal = DryRun(self._trainer, *self._callbacks)
        reserve, held = self._limits.reserve_bytes, self._held_bytes
        missing = left_out(self._trainer, self._finder, self._callbacks[0])
        probe = LightningProbe(
            rehearsal, self._setting, self._batches, state, self._memory, self.device, reserve, held, missing
        )
        probe.warm_up(shape)
        return probe


def _warn(error: CacheFailed) -> None:
    rank_zero_warn(
        f"BatchFinder goes on without its cache: {error.url} cannot be used: {error.reason.rstrip('.')}. Pass "
        "BatchFinder(cache=...) a place that can be written, or cache=False."
    )


Lengths = Callable[[int | None], Sequence[int | None]]
Train = tuple[int, Shape, ProbeBatches]


def batches_of(finder: Any, trainer: Any, stage: str, loop: Any, ranks: Ranks, resized: bool = True) -> ProbeBatches:
    """Where a stage's batches come from; loaders that cannot be given a size are refused before any is tried.

    Args:
        finder: the callback that asks.
        trainer: set up.
        stage: `fit`, `validate`, `test` or `predict`.
        loop: the stage's.
        ranks: who agrees.
        resized: whether the loaders are to be given a size.
    """
    untouched = capture_data(trainer, finder)
    try:
        batches = ProbeBatches(trainer, trainer.lightning_module, loop._data_source, finder.make_batch)
        if ranks.together(lambda: batches.loaders, "made its loaders") is not None and resized:
            trusted = has_size(trainer.lightning_module, finder.batch_size_attribute)
            check_loaders(loop._data_source, batches.loaders, stage, trusted)
    finally:
        untouched.restore()
    return batches


def setting_for(trainer: Any, stage: str, target: int | None, train: Train | None, splits: bool) -> Setting:
    """What is tried where batches are not split.

    Args:
        trainer: set up.
        stage: `fit`, `validate`, `test` or `predict`.
        target: samples per optimizer step; None for no target.
        train: what a fit trains with while it validates; None where it makes its batches itself, and to fit.
        splits: whether that fit splits its batches.
    """
    if trainer.state.fn != "fit":
        return Setting(stage, alone=True)
    if stage == "fit":
        return Setting(stage, target, trainer.accumulate_grad_batches, num_devices=trainer.world_size)
    return Setting(stage, None, 2 if splits else trainer.accumulate_grad_batches, train)


def find_sizes(
    finder: Any,
    trainer: Any,
    setting: Setting,
    batches: ProbeBatches,
    ranks: Ranks,
    cap: int | None,
    lengths: Lengths,
    also: Sequence[Any] = (),
) -> list[Found]:
    """Find each length's size, and say what was found.

    Args:
        finder: the callback that asks.
        trainer: set up, with its model on the device.
        setting: what is tried.
        batches: where batches come from.
        ranks: who agrees.
        cap: the largest size of use; None for none but the dataset's.
        lengths: says, given the longest length in the data, which ones to find sizes for, longest first. Where batches
            are split, lengths below one at which a batch fits whole are left out.
        also: callbacks that take part in the tries besides the user's.

    Raises:
        OutOfMemory: not even one sample fits.
        Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
    """
    started = time.perf_counter()
    memory = agreed_memory(memory_of(trainer.strategy.root_device, finder.budget), ranks)
    free = memory.free_bytes()
    reserve = finder.headroom if isinstance(finder.headroom, int) else int(finder.headroom * free)

    def look() -> tuple[int | None, int | None]:
        caps = [size for size in (finder.max_batch_size, cap, batches.dataset_size()) if size is not None]
        return min(caps, default=None), None if finder.seq_lens else batches.longest_seq_len()

    with Progress(trainer) as progress:
        untouched = capture_data(trainer, finder)
        try:
            cap, longest = agreed_data(*ranks.together(look, "looked at the data"), ranks)
            store = _store(finder.cache)
            kept, starting = active_callbacks(trainer, finder, finder.probe_callbacks)
            finding = StageTuner(
                trainer,
                finder,
                setting,
                batches,
                ([*kept, *also], starting),
                memory,
                SearchLimits(cap, finder.tolerance, reserve, finder.headroom),
                store,
                progress.tried,
                finder.predict,
                ranks,
            )
            shapes = [Shape(seq_len) for seq_len in lengths(longest)]
            keys = [None if store is None else finding.key(shape) for shape in shapes]
        finally:
            untouched.restore()
        founds: list[Found] = []
        try:
            for shape, key in zip(shapes, keys, strict=True):
                finding.predicted = _scaled(founds[-1], shape) if founds and setting.split_batch_size else None
                founds.append(finding.find(shape, key))
                if setting.split_batch_size is not None and founds[-1].batch_size >= setting.split_batch_size:
                    break
        finally:
            finding.close()
    overhead = (time.perf_counter() - started - sum(found.seconds for found in founds)) / len(founds)
    for found in founds:
        seconds = found.seconds + overhead
        rank_zero_info(summary_line(setting.stage, found.outcome, found.plan, free, reserve, seconds))
    return founds


def _scaled(found: Found, shape: Shape) -> int | None:
    """As many tokens as at another length; more may fit, where attention took its part of the memory."""
    longer = found.outcome.shape.seq_len
    if longer is None or shape.seq_len is None:
        return None
    return found.outcome.max_batch_size * longer // shape.seq_len


def _store(cache: Any) -> Store | None:
    if cache is False:
        return None
    if isinstance(cache, Store):
        return cache
    return Store(None if cache is True else cache)
