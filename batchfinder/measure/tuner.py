"""What is known from earlier runs: whether an answer still holds, and lowering one that did not.

The answer for one shape: what is known of it, else a search with real steps, and a plan for the target.

What came of one shape, in words.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.errors import CacheFailed, InvalidValue, OutOfMemory
from batchfinder.find import ResultEntry, find_max_batch_size, try_size
from batchfinder.measure.device_memory import RESOLUTION, CoarsePeaks, Memory
from batchfinder.probe import Probe
from batchfinder.results import Measurement, SearchResult, Shape, Stop, Trial, Verdict
from batchfinder.search import Bounds, Capped, Floored, Headroom, Multiples, Search, Secant
from batchfinder.units import format_bytes

PLENTY = 0.8
"""Share of the free memory within which a known peak is far from it: a cap and not memory bounded the answer."""

SLACK = 0.01
"""Share of the memory that was free by which less may be free for an answer to be used as it is."""


@dataclass(frozen=True)
class SearchLimits:
    """What bounds the search.

    Attributes:
        cap: the largest size of use; None for none.
        tolerance: share of the answer that may be left on the table.
        reserve_bytes: memory to keep free, in bytes.
        headroom: the same as it was asked for.
    """

    cap: int | None
    tolerance: float
    reserve_bytes: int
    headroom: float | int


def holds(outcome: SearchResult, free_bytes: int) -> bool:
    """Whether an outcome can be used without trying it again: as much is free as then, or far more than it takes.

    Args:
        outcome: as it was kept.
        free_bytes: what is free now, less what is to stay free.
    """
    then, seen = outcome.free_bytes, outcome.measurement
    if seen is None and outcome.max_batch_size > 0:
        return False
    peak = None if seen is None else seen.peak_reserved_bytes
    if peak is not None and peak <= PLENTY * free_bytes:
        return True
    return then is not None and free_bytes >= then - int(SLACK * then)


def lower(slot: ResultEntry, batch_size: int, message: str) -> int:
    """Lower a record that training has proved wrong; the next start tries the new size before it uses it.

    Args:
        slot: where the record is.
        batch_size: the size that ran out of memory.
        message: the device's own words.

    Returns:
        The new size: 5 % less, and at least one sample less.
    """
    lowered = max(0, min(batch_size - 1, int(0.95 * batch_size)))
    known = slot.get()
    if known is not None and known.max_batch_size > lowered:
        failed = Trial(batch_size, known.shape, Measurement(Verdict.OUT_OF_MEMORY, message=message))
        slot.put(
            replace(
                known,
                max_batch_size=lowered,
                stop=Stop.TOLERANCE,
                measurement=None,
                trials=(*(trial for trial in known.trials if trial.batch_size < batch_size), failed),
            )
        )
    return lowered


@dataclass(frozen=True)
class TuningResult:
    """What came of one shape.

    Attributes:
        outcome: the largest size; its trials are those of this start, none when it came from the cache.
        plan: how the target is made up; None without one.
        slot: where the answer is kept; None without a cache.
        seconds: what it took.
    """

    outcome: SearchResult
    plan: AccumulationPlan | None
    slot: ResultEntry | None
    seconds: float

    @property
    def batch_size(self) -> int:
        """The size to train with: the plan's micro-batch, or the largest."""
        return self.outcome.max_batch_size if self.plan is None else self.plan.micro_batch_size


class Tuner:
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
        limits: SearchLimits,
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

    def find(self, shape: Shape, slot: ResultEntry | None) -> TuningResult:
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
        return TuningResult(shown, plan, slot, time.perf_counter() - started)

    def _known(self, slot: ResultEntry | None) -> SearchResult | None:
        if slot is None:
            return None
        try:
            return slot.get()
        except CacheFailed as error:
            self._goes_on_without(error)
            return None

    def _keep(self, slot: ResultEntry | None, outcome: SearchResult, trials: list[Trial]) -> None:
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

    def _certified(self, known: SearchResult, trials: list[Trial]) -> SearchResult | None:
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

    def _search(self, shape: Shape, trials: list[Trial]) -> SearchResult:
        limits = self._limits
        probe, held = self._prober(shape)
        usable = self._room(held)
        failed = min((trial.batch_size for trial in trials if not trial.fits), default=None)
        predicted = self._predicted(shape, usable) if failed is None else int(0.95 * failed)
        search: Search[Any] = Secant(limit_bytes=usable, tolerance=limits.tolerance, predicted=predicted)
        if self._memory.first_step_overhead:
            search = CoarsePeaks(search, usable // RESOLUTION, lambda: usable - self._room(held))
        search = Floored(Multiples(search, self._multiple_of), self._smallest)
        if limits.cap is not None:
            search = Capped(search, limits.cap)
        search = self._judged(search)
        found = find_max_batch_size(probe, shape, search=search, on_trial=lambda trial: self._note(trial, trials))
        return self._settled(found, trials, held)

    def _predicted(self, shape: Shape, usable_bytes: int) -> int | None:
        return None if self._hint is None else self._hint(shape, usable_bytes)

    def _settled(self, found: SearchResult, trials: list[Trial], held_bytes: int) -> SearchResult:
        """Try the answer again where tries after it have left less room than it took; lower it if it fails.

        On a CPU every new size leaves something in the process for good (oneDNN keeps the kernels it compiles for a
        shape: 1 to 2 MiB each), so that what ran in the middle of a search may not run at its end.
        """
        size, seen, step = found.max_batch_size, found.measurement, self._multiple_of
        room = self._room(held_bytes)
        if not self._memory.first_step_overhead or seen is None or (seen.peak_reserved_bytes or 0) <= room:
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
        return max(1, self._memory.max_peak_bytes(held_bytes) - self._limits.reserve_bytes)

    def _judged(self, search: Search[Any]) -> Search[Any]:
        """Judge peaks afterwards where the system does not enforce a limit."""
        return search if self._memory.has_hard_limit else Headroom(search, max(1, self._free_bytes), 0)

    def _plan(self, outcome: SearchResult, trials: list[Trial]) -> AccumulationPlan | None:
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

    def _out_of_memory(self, outcome: SearchResult, trials: list[Trial]) -> OutOfMemory:
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


def summary(
    outcome: SearchResult, plan: AccumulationPlan | None, limit_bytes: int, reserve_bytes: int, seconds: float
) -> str:
    """Say what was found, at what peak, with what headroom, how it is accumulated, and what it took.

    Args:
        outcome: what was found; its source is `cache` where nothing was searched.
        plan: how the target is made up; None without one.
        limit_bytes: what training could take.
        reserve_bytes: what of it was kept free.
        seconds: what it took.
    """
    length = "" if outcome.shape.seq_len is None else f" at seq_len {outcome.shape.seq_len}"
    parts = [f"batch size {outcome.max_batch_size}{length}"]
    peak = None
    if outcome.measurement is not None:
        seen = outcome.measurement
        peak = seen.peak_allocated_bytes if seen.peak_reserved_bytes is None else seen.peak_reserved_bytes
    parts.append(
        f"limit {format_bytes(limit_bytes)}"
        if peak is None
        else f"peak {format_bytes(peak)} of {format_bytes(limit_bytes)}"
    )
    if reserve_bytes:
        parts.append(f"headroom {format_bytes(reserve_bytes)}")
    if plan is not None:
        parts.append(f"accumulation {plan}")
    probes = sum(trial.batch_size > 0 for trial in outcome.trials)
    how = "from the cache" if outcome.source == "cache" and not probes else f"{probes} probe{'s' * (probes != 1)}"
    if outcome.source == "cache" and probes:
        how = f"from the cache, certified with {how}"
    parts.append(f"{how} in {seconds:.2f} s")
    return "; ".join(parts)
