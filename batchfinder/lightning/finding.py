"""One stage of one trainer: what is known of it, else a search, and a plan for the target."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.cache import CacheKey, Store
from batchfinder.errors import CacheFailed, OutOfMemory
from batchfinder.find import OutcomeSlot, find_max_batch_size
from batchfinder.lightning.hint import hint, simulated_device
from batchfinder.lightning.known import make_key
from batchfinder.lightning.participants import left_out
from batchfinder.lightning.probe import Batches, LightningProbe, Setting
from batchfinder.lightning.rehearsal import Rehearsal
from batchfinder.lightning.trainer_state import capture
from batchfinder.outcome import Outcome, Shape, Stop, Trial
from batchfinder.probe import Probe
from batchfinder.probing.clearing import clear
from batchfinder.probing.coarse import RESOLUTION, CoarsePeaks
from batchfinder.probing.known import Limits, holds
from batchfinder.probing.memory import Memory
from batchfinder.search import Capped, Headroom, Search, Secant

_FEW = 8
"""Up to this cap no search takes as long as a hint."""


@dataclass(frozen=True)
class Found:
    """What came of one length.

    Attributes:
        outcome: the largest size; its trials are those of this start, none when it came from the cache.
        plan: how the target is made up; None without one.
        slot: where the answer is kept; None without a cache.
        seconds: what it took.
    """

    outcome: Outcome
    plan: AccumulationPlan | None
    slot: OutcomeSlot | None
    seconds: float

    @property
    def batch_size(self) -> int:
        """The size to train with: the plan's micro-batch, or the largest."""
        return self.outcome.max_batch_size if self.plan is None else self.plan.micro_batch_size


class Finding:
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
    """

    def __init__(
        self,
        trainer: Any,
        finder: Any,
        setting: Setting,
        batches: Batches,
        callbacks: tuple[list[Any], list[Any]],
        memory: Memory,
        limits: Limits,
        store: Store | None,
        on_trial: Callable[[Trial], object],
        predict: bool | None = None,
    ) -> None:
        self._trainer = trainer
        self._finder = finder
        self._setting = setting
        self._batches = batches
        self._callbacks = callbacks
        self._memory = memory
        self._limits = limits
        self._store = store
        self._on_trial = on_trial
        self._predict = self.device.type == "cuda" if predict is None else predict
        self._probe: LightningProbe | None = None
        self._free_bytes = max(0, memory.free_bytes() - limits.reserve_bytes)
        self._held_bytes = 0
        self._froze = False
        self._warned = False

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self._trainer.strategy.root_device
        return device

    def key(self, shape: Shape) -> CacheKey:
        """Where the answer for a shape is kept.

        Args:
            shape: one sample's shape.
        """
        sample = self._batches.batch(1, shape.seq_len)
        return make_key(self._trainer, self._setting, shape, sample, self._memory, self._limits, self._callbacks[0])

    def find(self, shape: Shape, key: CacheKey | None) -> Found:
        """Look the answer up, and search where there is none or it no longer holds.

        Args:
            shape: one sample's shape.
            key: from `key`; None without a cache.

        Raises:
            OutOfMemory: not even one sample fits.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        started = time.perf_counter()
        name = type(self._trainer.lightning_module).__name__
        slot = None if self._store is None or key is None else self._store.slot(key, name)
        known = self._known(slot)
        trials: list[Trial] = []
        outcome = known
        if known is None or not holds(known, self._free_bytes):
            outcome = self._certified(known, trials) if known is not None else None
            if outcome is None:
                outcome = self._search(shape, trials)
        assert outcome is not None
        if outcome.max_batch_size == 0:
            self._keep(slot, outcome, trials)
            raise OutOfMemory(1, _advice(outcome, shape))
        plan, outcome = self._plan(outcome, trials)
        if trials:
            self._keep(slot, outcome, trials)
        source = "cache" if known is not None and not self._searched(trials, known) else outcome.source
        shown = replace(outcome, trials=tuple(trials), source=source)
        return Found(shown, plan, slot, time.perf_counter() - started)

    def close(self) -> None:
        """Let go of the copy of the training state, and of all memory that is not in use."""
        if self._probe is None:
            return
        self._probe = None
        if self._froze:
            gc.unfreeze()
        clear(self.device)

    def _searched(self, trials: list[Trial], known: Outcome) -> bool:
        return any(trial.batch_size != known.max_batch_size for trial in trials)

    def _known(self, slot: OutcomeSlot | None) -> Outcome | None:
        if slot is None:
            return None
        try:
            return slot.get()
        except CacheFailed as error:
            self._warn(error)
            return None

    def _keep(self, slot: OutcomeSlot | None, outcome: Outcome, trials: list[Trial]) -> None:
        if slot is None:
            return
        kept = {trial.batch_size: trial for trial in (*outcome.trials, *trials)}
        try:
            slot.put(replace(outcome, trials=tuple(kept.values()), free_bytes=self._free_bytes))
        except CacheFailed as error:
            self._warn(error)

    def _warn(self, error: CacheFailed) -> None:
        """Say once that answers are not kept: a cache that cannot be read cannot be written either."""
        if not self._warned:
            rank_zero_warn(
                f"BatchFinder goes on without its cache: {error.url} cannot be used: {error.reason.rstrip('.')}. Pass "
                "BatchFinder(cache=...) a place that can be written, or cache=False."
            )
        self._warned = True

    def _certified(self, known: Outcome, trials: list[Trial]) -> Outcome | None:
        """A known answer that was tried again; None when it does not run any more."""
        if known.max_batch_size == 0:
            return None
        trial = self._try(known.max_batch_size, known.shape, trials)
        return replace(known, measurement=trial.measurement) if trial.fits else None

    def _try(self, batch_size: int, shape: Shape, trials: list[Trial]) -> Trial:
        search = self._judged(Secant())
        trial = search.judge(Trial(batch_size, shape, self._prober(shape)(batch_size, shape)))
        trials.append(trial)
        self._on_trial(trial)
        return trial

    def _search(self, shape: Shape, trials: list[Trial]) -> Outcome:
        limits, probe = self._limits, self._prober(shape)
        failed = min((trial.batch_size for trial in trials if not trial.fits), default=None)
        predicted = self._hint(shape) if failed is None else int(0.95 * failed)
        usable = self._room()
        search: Search[Any] = Secant(limit_bytes=usable, tolerance=limits.tolerance, predicted=predicted)
        if self._memory.warms_up:
            search = CoarsePeaks(search, usable // RESOLUTION, lambda: usable - self._room())
        if limits.cap is not None:
            search = Capped(search, limits.cap)

        def note(trial: Trial) -> None:
            trials.append(trial)
            self._on_trial(trial)

        return self._settled(find_max_batch_size(probe, shape, search=self._judged(search), on_trial=note), trials)

    def _hint(self, shape: Shape) -> int | None:
        """The simulated step's answer; None where it would cost more than the probes it saves."""
        cap = self._limits.cap
        if not self._predict or (cap is not None and cap <= _FEW):
            return None
        device = simulated_device(self.device, self._memory, self._room(), self._trainer.lightning_module)
        host = self.device.type == "cpu"
        return hint(self._trainer, self._finder, self._setting, self._batches, shape, device, host, cap)

    def _settled(self, found: Outcome, trials: list[Trial]) -> Outcome:
        """Try the answer again where tries after it have left less room than it took; lower it if it fails.

        On a CPU every new size leaves something in the process for good (oneDNN keeps the kernels it compiles for a
        shape: 1 to 2 MiB each), so that what ran in the middle of a search may not run at its end.
        """
        size, seen = found.max_batch_size, found.measurement
        if not self._memory.warms_up or seen is None or (seen.peak_reserved_bytes or 0) <= self._room():
            return found
        share = self._room() / (seen.peak_reserved_bytes or 1)
        while size:
            trial = self._try(size, found.shape, trials)
            if trial.fits:
                return replace(found, max_batch_size=size, measurement=trial.measurement)
            size = min(size - 1, int(size * min(share, 0.98)))
            share = 1.0
            found = replace(found, stop=Stop.TOLERANCE)
        return replace(found, max_batch_size=0, measurement=None)

    def _room(self) -> int:
        """What a peak may come to now."""
        return max(1, self._memory.room_bytes(self._held_bytes) - self._limits.reserve_bytes)

    def _judged(self, search: Search[Any]) -> Search[Any]:
        """Judge peaks afterwards where the system does not enforce a limit."""
        if self._memory.enforced:
            return search
        return Headroom(search, max(1, self._free_bytes), 0)

    def _plan(self, outcome: Outcome, trials: list[Trial]) -> tuple[AccumulationPlan | None, Outcome]:
        """The plan whose micro-batch was itself tried, since a smaller size does not always take less."""
        target, limit = self._setting.target_batch_size, outcome.max_batch_size
        if target is None:
            return None, outcome
        while True:
            if limit == 0:
                raise OutOfMemory(1, _advice(outcome, outcome.shape))
            plan = plan_accumulation(target, limit)
            tried = {trial.batch_size: trial for trial in (*outcome.trials, *trials)}
            trial = tried.get(plan.micro_batch_size)
            if trial is None:
                trial = self._try(plan.micro_batch_size, outcome.shape, trials)
            if trial.fits:
                return plan, outcome
            limit = plan.micro_batch_size - 1

    def _prober(self, shape: Shape) -> Probe:
        """The probe, made when it is first needed: it copies the training state."""
        if self._probe is None:
            clear(self.device)
            if gc.get_freeze_count() == 0:
                # A collection after each try then looks at what the tries made, and at nothing else: 250 ms less.
                gc.freeze()
                self._froze = True
            before = self._memory.held_bytes()
            state = capture(self._trainer, self._finder)
            self._held_bytes = min(state.nbytes, max(0, self._memory.held_bytes() - before))
            rehearsal = Rehearsal(self._trainer, *self._callbacks)
            reserve, held = self._limits.reserve_bytes, self._held_bytes
            missing = left_out(self._trainer, self._finder, self._callbacks[0])
            self._probe = LightningProbe(
                rehearsal, self._setting, self._batches, state, self._memory, self.device, reserve, held, missing
            )
            self._probe.warm_up(shape)
        return self._probe


def _advice(outcome: Outcome, shape: Shape) -> str:
    words = next((t.measurement.message for t in outcome.trials if t.batch_size == 1 and not t.fits), "")
    shorter = "" if shape.seq_len is None else f" or sequences shorter than {shape.seq_len}"
    reason = words.rstrip(".") or "it was tried before, with as much memory free"
    return (
        f"{reason}. Try a smaller model{shorter}, a lower precision, "
        "activation checkpointing or an optimizer with less state."
    )
