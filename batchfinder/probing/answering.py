"""The answer for one shape: what is known of it, else a search with real steps, and a plan for the target."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.errors import CacheFailed, InvalidValue, OutOfMemory
from batchfinder.find import OutcomeSlot, find_max_batch_size, try_size
from batchfinder.outcome import Outcome, Shape, Stop, Trial
from batchfinder.probe import Probe
from batchfinder.probing.coarse import RESOLUTION, CoarsePeaks
from batchfinder.probing.known import Limits, holds
from batchfinder.probing.memory import Memory
from batchfinder.search import Bounds, Capped, Floored, Headroom, Multiples, Search, Secant


@dataclass(frozen=True)
class Answer:
    """What came of one shape.

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


class Answering:
    """Finds answers on one device.

    Args:
        memory: the device's memory.
        limits: what bounds the search.
        prober: returns the probe for a shape, and what it holds on the device that training will not have, in bytes.
            Asked only when something has to be tried.
        target_batch_size: samples per optimizer step; None for no plan.
        min_batch_size: the smallest size of use.
        multiple_of: sizes to try are multiples of this, which the target must be as well.
        on_trial: called after each probe.
        hint: asked before a search for a guess of the answer, given the shape and what a peak may come to, in bytes.
        num_devices: devices that train side by side, which make up the target together.
        warn: told once that answers are not kept, and why; None for a warning of Python's.
    """

    def __init__(
        self,
        memory: Memory,
        limits: Limits,
        prober: Callable[[Shape], tuple[Probe, int]],
        target_batch_size: int | None = None,
        min_batch_size: int = 1,
        multiple_of: int = 1,
        on_trial: Callable[[Trial], object] | None = None,
        hint: Callable[[Shape, int], int | None] | None = None,
        num_devices: int = 1,
        warn: Callable[[CacheFailed], object] | None = None,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._prober = prober
        self._target = target_batch_size
        self._multiple_of = multiple_of
        self._smallest = Bounds(min_batch_size, limits.cap, multiple_of).first
        self._on_trial = on_trial
        self._hint = hint
        self._num_devices = num_devices
        self._warn = _warn if warn is None else warn
        self._warned = False
        self._free_bytes = max(0, memory.free_bytes() - limits.reserve_bytes)

    def find(self, shape: Shape, slot: OutcomeSlot | None) -> Answer:
        """Look the answer up, and search where there is none or it no longer holds.

        Args:
            shape: one sample's shape.
            slot: where the answer is kept; None to keep none.

        Raises:
            OutOfMemory: not even the smallest size fits.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        started = time.perf_counter()
        known = self._known(slot)
        trials: list[Trial] = []
        outcome = known
        if known is None or not holds(known, self._free_bytes):
            outcome = None if known is None else self._certified(known, trials)
            if outcome is None:
                outcome = self._search(shape, trials)
        assert outcome is not None
        if outcome.max_batch_size == 0:
            self._keep(slot, outcome, trials)
            raise self._out_of_memory(outcome, trials)
        plan = self._plan(outcome, trials)
        if trials:
            self._keep(slot, outcome, trials)
        cached = known is not None and all(trial.batch_size == outcome.max_batch_size for trial in trials)
        shown = replace(outcome, trials=tuple(trials), source="cache" if cached else outcome.source)
        return Answer(shown, plan, slot, time.perf_counter() - started)

    def _known(self, slot: OutcomeSlot | None) -> Outcome | None:
        if slot is None:
            return None
        try:
            return slot.get()
        except CacheFailed as error:
            self._goes_on_without(error)
            return None

    def _keep(self, slot: OutcomeSlot | None, outcome: Outcome, trials: list[Trial]) -> None:
        if slot is None:
            return
        kept = {trial.batch_size: trial for trial in (*outcome.trials, *trials)}
        try:
            slot.put(replace(outcome, trials=tuple(kept.values()), free_bytes=self._free_bytes))
        except CacheFailed as error:
            self._goes_on_without(error)

    def _goes_on_without(self, error: CacheFailed) -> None:
        """Say so once: a cache that cannot be read cannot be written either."""
        if not self._warned:
            self._warn(error)
        self._warned = True

    def _certified(self, known: Outcome, trials: list[Trial]) -> Outcome | None:
        """A known answer that was tried again; None when it does not run any more."""
        size = known.max_batch_size // self._multiple_of * self._multiple_of
        if size < self._smallest:
            return None
        trial = self._try(size, known.shape, trials)
        return replace(known, max_batch_size=size, measurement=trial.measurement) if trial.fits else None

    def _try(self, batch_size: int, shape: Shape, trials: list[Trial]) -> Trial:
        probe, _ = self._prober(shape)
        search = self._judged(Secant())
        trial = try_size(probe, search, search.init(shape, Bounds()), batch_size, shape)
        self._note(trial, trials)
        return trial

    def _note(self, trial: Trial, trials: list[Trial]) -> None:
        trials.append(trial)
        if self._on_trial is not None:
            self._on_trial(trial)

    def _search(self, shape: Shape, trials: list[Trial]) -> Outcome:
        limits = self._limits
        probe, held = self._prober(shape)
        usable = self._room(held)
        failed = min((trial.batch_size for trial in trials if not trial.fits), default=None)
        predicted = self._predicted(shape, usable) if failed is None else int(0.95 * failed)
        search: Search[Any] = Secant(limit_bytes=usable, tolerance=limits.tolerance, predicted=predicted)
        if self._memory.warms_up:
            search = CoarsePeaks(search, usable // RESOLUTION, lambda: usable - self._room(held))
        search = Floored(Multiples(search, self._multiple_of), self._smallest)
        if limits.cap is not None:
            search = Capped(search, limits.cap)
        search = self._judged(search)
        found = find_max_batch_size(probe, shape, search=search, on_trial=lambda trial: self._note(trial, trials))
        return self._settled(found, trials, held)

    def _predicted(self, shape: Shape, usable_bytes: int) -> int | None:
        return None if self._hint is None else self._hint(shape, usable_bytes)

    def _settled(self, found: Outcome, trials: list[Trial], held_bytes: int) -> Outcome:
        """Try the answer again where tries after it have left less room than it took; lower it if it fails.

        On a CPU every new size leaves something in the process for good (oneDNN keeps the kernels it compiles for a
        shape: 1 to 2 MiB each), so that what ran in the middle of a search may not run at its end.
        """
        size, seen, step = found.max_batch_size, found.measurement, self._multiple_of
        room = self._room(held_bytes)
        if not self._memory.warms_up or seen is None or (seen.peak_reserved_bytes or 0) <= room:
            return found
        share = room / (seen.peak_reserved_bytes or 1)
        while size >= self._smallest:
            trial = self._try(size, found.shape, trials)
            if trial.fits:
                return replace(found, max_batch_size=size, measurement=trial.measurement)
            size = min(size - 1, int(size * min(share, 0.98))) // step * step
            share = 1.0
            found = replace(found, stop=Stop.TOLERANCE)
        return replace(found, max_batch_size=0, measurement=None)

    def _room(self, held_bytes: int) -> int:
        """What a peak may come to now."""
        return max(1, self._memory.room_bytes(held_bytes) - self._limits.reserve_bytes)

    def _judged(self, search: Search[Any]) -> Search[Any]:
        """Judge peaks afterwards where the system does not enforce a limit."""
        return search if self._memory.enforced else Headroom(search, max(1, self._free_bytes), 0)

    def _plan(self, outcome: Outcome, trials: list[Trial]) -> AccumulationPlan | None:
        """The plan whose micro-batch was itself tried, since a smaller size does not always take less."""
        if self._target is None:
            return None
        limit, step = outcome.max_batch_size, self._multiple_of
        while limit >= self._smallest:
            plan = plan_accumulation(self._target // step, limit // step, self._num_devices)
            plan = replace(plan, target_batch_size=self._target, micro_batch_size=plan.micro_batch_size * step)
            if plan.micro_batch_size < self._smallest:
                expected = f"a multiple of any size from {self._smallest} to {limit}, which fit"
                raise InvalidValue("target_batch_size", self._target, expected)
            seen = {trial.batch_size: trial for trial in (*outcome.trials, *trials)}
            trial = seen.get(plan.micro_batch_size) or self._try(plan.micro_batch_size, outcome.shape, trials)
            if trial.fits:
                return plan
            limit = plan.micro_batch_size - 1
        raise self._out_of_memory(outcome, trials)

    def _out_of_memory(self, outcome: Outcome, trials: list[Trial]) -> OutOfMemory:
        size = self._smallest
        failed = [trial for trial in (*trials, *outcome.trials) if trial.batch_size == size and not trial.fits]
        words = failed[0].measurement.message if failed else ""
        shorter = "" if outcome.shape.seq_len is None else f" or sequences shorter than {outcome.shape.seq_len}"
        reason = words.rstrip(".") or "it was tried before, with as much memory free"
        return OutOfMemory(
            size,
            f"{reason}. Try a smaller model{shorter}, a lower precision, "
            "activation checkpointing or an optimizer with less state.",
        )


def _warn(error: CacheFailed) -> None:
    warnings.warn(f"batchfinder goes on without its cache: {error}", stacklevel=2)
