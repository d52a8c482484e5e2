"""From a question to a batch size on a real device: look it up and certify it with one trial, or search, and keep it.

The command line, the Lightning callback, `tune_batch_size` and `tune_trainer` differ in how they make a probe and in
the key under which a result is cached; the rest is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.cache.store import ResultEntry
from batchfinder.cache.validity import holds, outgrown
from batchfinder.errors import (
    BatchFinderError,
    CacheFailed,
    InvalidValue,
    OutOfMemory,
    RankFailed,
    UserCodeFailed,
    shortened,
)
from batchfinder.find import find_max_batch_size
from batchfinder.probe import Probe
from batchfinder.results import SearchResult, Shape, Throughput, Trial
from batchfinder.search import Bounds, Capped, Floored, Multiples, Prediction, Search, Secant
from batchfinder.search.base import check_tolerance
from batchfinder.search.throughput import find_full_speed, sizes_to_time
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.units import format_bytes

_BELOW_A_FAILURE = 0.95
"""Share of a size that ran before and fails now from which a search starts, where memory alone does not say less."""

_AFTER_A_LEAK, _MOST_AFTER_A_LEAK = 0.02, 0.05
"""The least tolerance of a search that goes on because trials have left memory behind, doubled each time up to the
second: each further trial leaves more, so that a finer search would end lower."""


GOALS = ("memory", "throughput")

_MULTIPLES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32, 64)
"""Numbers of which a step may want its batch size to be a multiple."""

_TIMED_STEPS = 3
"""Steps that are timed at least each time that a size is."""


_SPARE = 0.03
"""Share of the memory that tries leave free where batches differ in length.

How far the cache falls to pieces depends on the order of the lengths, of which a try has some and an epoch has others.
By how much: `benchmarks/random_fits.py --reserved`.
"""
_EXPANDABLE_SPARE = 0.02
"""Where segments are expandable, whatever the lengths: what these take differs a little from epoch to epoch."""


def spare_bytes(usable_bytes: int, varies: bool) -> int:
    """What tries on a GPU leave free of what may be used of it.

    Args:
        varies: whether batches differ in length.
    """
    if AllocatorSettings.from_environment().expandable_segments:
        return int(_EXPANDABLE_SPARE * usable_bytes)
    return int(_SPARE * usable_bytes) if varies else 0


@dataclass(frozen=True)
class SearchLimits:
    """What bounds the search, and what the size found is for.

    Attributes:
        max_batch_size: the largest size of use; None for none.
        tolerance: share of the answer that may be left on the table.
        reserve_bytes: memory to keep free, in bytes; see `with_memory`.
        headroom: the same as it was asked for: a share (a float), or bytes (an int).
        min_batch_size: the smallest size of use.
        multiple_of: every size tried is a multiple of this; the target must be one as well.
        target_batch_size: samples per optimizer step, made up of micro-batches that fit; None for no target.
        num_devices: devices that train side by side and make up the target together.
        exact: whether the target is met exactly, however slow; see `plan_accumulation`.
        certify: whether a cached result is tried once before it is used, however much memory is free.
        from_two: whether to go on from 2 samples where 1 raises and 2 run, which is for want of a second sample.
        goal: one of `GOALS`: the largest size that fits, or the smallest of those up to it that trains at full speed.
        accumulation: micro-batches per optimizer step where there is no target.

    Raises:
        InvalidValue: a size is below 1, the target cannot be made up of such sizes, or there is no such goal.
    """

    max_batch_size: int | None = None
    tolerance: float = 0.01
    reserve_bytes: int = 0
    headroom: float | int = 0
    min_batch_size: int = 1
    multiple_of: int = 1
    target_batch_size: int | None = None
    num_devices: int = 1
    exact: bool = False
    certify: bool = True
    from_two: bool = True
    goal: str = "memory"
    accumulation: int = 1

    def __post_init__(self) -> None:
        target, step = self.target_batch_size, self.multiple_of
        for option in ("target_batch_size", "min_batch_size", "max_batch_size", "multiple_of"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise InvalidValue(option, value, "a size of at least 1")
        if target is not None and target % step:
            raise InvalidValue("target_batch_size", target, f"a multiple of {step}, as multiple_of asks of each size")
        if target is not None and target < self.min_batch_size:
            raise InvalidValue("target_batch_size", target, f"at least the min_batch_size of {self.min_batch_size}")
        check_tolerance(self.tolerance)
        if self.goal not in GOALS:
            raise InvalidValue("goal", self.goal, f"one of {', '.join(GOALS)}")

    @property
    def cap(self) -> int | None:
        """The largest size of use: no micro-batch exceeds a device's part of the target."""
        part = None if self.target_batch_size is None else -(-self.target_batch_size // self.num_devices)
        return min((size for size in (self.max_batch_size, part) if size is not None), default=None)

    @property
    def bounds(self) -> Bounds:
        """The sizes that may be tried.

        Raises:
            InvalidValue: there are none.
        """
        return Bounds(self.min_batch_size, self.cap, self.multiple_of)

    def with_memory(self, free_bytes: int) -> SearchLimits:
        """The same with the headroom in bytes: a headroom that is a share is one of `free_bytes`."""
        reserve = self.headroom if isinstance(self.headroom, int) else int(self.headroom * free_bytes)
        return replace(self, reserve_bytes=reserve)


@dataclass(frozen=True)
class TuningResult:
    """The batch size for one shape.

    Attributes:
        result: the largest size that runs, 0 when none does. Its trials are those of this start, and its source is
            `cache` where nothing was searched. Its `throughput` may be known though it was not asked for.
        plan: how the target is made up; None without one.
        entry: where the result is cached; None without a cache.
        seconds: what it took.
        limit_bytes: what training could take.
        reserve_bytes: what of it was kept free.
        lowered_by: a size that had run before and failed when it was tried again, so that a smaller one was searched.
        earlier_trials: those of earlier starts, from the cache.
        raised: what a single sample raised, where sizes from 2 on were searched for that; else empty.
        refused: why multiples of a number alone were searched that nobody asked for: what another size raised; else
            empty.
        held_bytes: what the process held before the first trial; None where it is not known.
        throughput: the smallest size at full speed, where that was the goal; None where it was not.
        timings: how often a size was timed in this start.
    """

    result: SearchResult
    plan: AccumulationPlan | None
    entry: ResultEntry | None
    seconds: float
    limit_bytes: int
    reserve_bytes: int
    lowered_by: Trial | None = None
    earlier_trials: tuple[Trial, ...] = ()
    raised: str = ""
    refused: str = ""
    held_bytes: int | None = None
    throughput: Throughput | None = None
    timings: int = 0

    @property
    def batch_size(self) -> int:
        """The size to train with: the plan's micro-batch, the smallest at full speed, or the largest."""
        if self.plan is not None:
            return self.plan.micro_batch_size
        return self.result.max_batch_size if self.throughput is None else self.throughput.batch_size

    def raise_if_nothing_fits(self) -> None:
        """Raise `OutOfMemory` where not even the smallest size runs: with it, the device's words and advice."""
        if self.result.max_batch_size == 0:
            failed = [trial for trial in self.result.trials if not trial.fits]
            smallest = min(failed, key=lambda trial: trial.batch_size)
            raise _out_of_memory(smallest, self.limit_bytes - self.reserve_bytes, self.held_bytes)

    def __str__(self) -> str:
        """Size, peak, headroom, speed, accumulation, trials and seconds, on one line."""
        result, seen = self.result, self.result.measurement
        length = "" if result.shape.seq_len is None else f" at seq_len {result.shape.seq_len}"
        parts = [f"batch size {result.max_batch_size}{length}"]
        peak, limit = None, format_bytes(self.limit_bytes)
        if seen is not None:
            peak = seen.peak_allocated_bytes if seen.peak_reserved_bytes is None else seen.peak_reserved_bytes
            # A size that ran shows that there was as much.
            limit = format_bytes(max(self.limit_bytes, peak or 0))
        parts.append(f"limit {limit}" if peak is None else f"peak {format_bytes(peak)} of {limit}")
        if self.reserve_bytes:
            parts.append(f"headroom {format_bytes(self.reserve_bytes)}")
        if self.throughput is not None:
            parts.append(str(self.throughput))
        if self.plan is not None:
            parts.append(f"accumulation {self.plan}")
        if self.lowered_by is not None:
            size, words = self.lowered_by.batch_size, self.lowered_by.measurement.verdict.value
            parts.append(f"lowered from {size}, which ran before; when it was tried again {words}")
        if self.raised:
            parts.append(f"from 2 on, since batch size 1 raised {self.raised}")
        if self.refused:
            parts.append(self.refused)
        count = len(result.trials)
        how = f"{count} probe{'s' * (count != 1)}"
        if result.source == "cache":
            how = f"from the cache, certified with {how}" if count else "from the cache"
        if self.timings:
            how += f" and {self.timings} timings"
        parts.append(f"{how} in {self.seconds:.2f} s")
        return "; ".join(parts)


class Tuner:
    """Finds batch sizes on one device.

    Args:
        free_bytes: says what training could take now.
        limits: what bounds the search.
        open_probe: returns the probe, and what a peak may come to now, in bytes. Called only when something has to be
            tried, since a probe may copy the training state.
        hint: called before a search for a guess of the answer, given the shape, the sizes that may be tried and what a
            peak may come to, in bytes.
        on_trial: called after each trial.
        warn: called once when results cannot be cached; None to raise the `CacheFailed` instead.
        held_bytes: what the process holds, for the message where nothing fits; None where it is not known.
        time_steps: has the probe time so many steps each time from now on, or none for 0; needed where the goal is
            throughput.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int],
        limits: SearchLimits,
        open_probe: Callable[[], tuple[Probe, int]],
        *,
        hint: Callable[[Shape, Bounds, int], Prediction | None] | None = None,
        on_trial: Callable[[Trial], object] | None = None,
        warn: Callable[[CacheFailed], object] | None = None,
        held_bytes: int | None = None,
        time_steps: Callable[[int], object] = lambda steps: None,
    ) -> None:
        self._limits = limits
        self._time_steps = time_steps
        self._bounds = limits.bounds
        self._open_probe = open_probe
        self._hint = hint
        self._on_trial = on_trial
        self._warn = warn
        self._held_bytes = held_bytes
        self._raised = self._refused = ""
        self._asked = 0  # the size that is tried, or was last
        self._cache_failed = False
        self._ask_free_bytes = free_bytes
        self._opened = False
        self._limit_bytes = free_bytes()
        self._free_bytes = max(0, self._limit_bytes - limits.reserve_bytes)
        self._trials: list[Trial] = []
        self._timed: list[Trial] = []

    def find(self, shape: Shape, entry: ResultEntry | None = None) -> TuningResult:
        """Look the answer up and certify it; search on a miss, where it does not run, or where more would fit now.

        Raises:
            OutOfMemory: no micro-batch that makes up the target runs.
            CacheFailed: the cache cannot be used, and there is no `warn`.
            Exception: whatever the user's code raised that is not about the size, unchanged.
        """
        started = time.perf_counter()
        self._trials, self._timed = [], []
        known, result, failed, again = None, None, None, None
        if entry is not None:
            with self._cache_errors():
                known = entry.get()
        if known is not None and not outgrown(known, self._free_bytes):
            size = self._bounds.floor(known.max_batch_size)  # it may have been lowered to no multiple
            if size and not self._limits.certify and holds(known, self._free_bytes):
                result = known
            elif size:
                again = self._try(size, known.shape)
                if again.fits and not outgrown(known, self._free_bytes, again.measurement):
                    result = replace(known, max_batch_size=size, measurement=again.measurement)
        cached = result is not None
        if result is None:
            result, failed = self._search(shape, known, again)
        # The least that it ran with: growth by less than what outgrows it is not to add up over many starts.
        then = result.free_bytes
        result = replace(result, free_bytes=self._free_bytes if then is None else min(self._free_bytes, then))
        earlier = result.trials if cached else ()
        if known is not None and known.max_batch_size == result.max_batch_size:
            result = replace(result, throughput=known.throughput)
        elif result.throughput is not None:  # a cached size was lowered to a multiple
            result = replace(result, throughput=None)
        if self._limits.goal == "throughput" and result.max_batch_size:
            # A checkpoint's result, which has no free bytes, stays as it is: the size is not to change within a run.
            resumed = cached and then is None
            if result.throughput is None or not (result.throughput.certain or resumed):
                result = replace(result, throughput=self._find_full_speed(result))
        throughput = result.throughput if self._limits.goal == "throughput" else None
        plan = self._plan(result, throughput)
        ran_larger = any(trial.fits and trial.batch_size > result.max_batch_size for trial in self._trials)
        if entry is not None and (self._trials or self._timed) and not ran_larger:  # else the next start searches anew
            last = {trial.batch_size: trial for trial in (*earlier, *self._trials)}
            with self._cache_errors():
                entry.put(replace(result, trials=tuple(last.values())))
        return TuningResult(
            replace(result, trials=tuple(self._trials), source="cache" if cached else result.source),
            plan,
            entry,
            seconds=time.perf_counter() - started,
            limit_bytes=self._limit_bytes,
            reserve_bytes=self._limits.reserve_bytes,
            lowered_by=failed,
            earlier_trials=earlier,
            raised=self._raised,
            refused=self._refused,
            held_bytes=self._held_bytes,
            throughput=throughput,
            timings=len(self._timed),
        )

    def _find_full_speed(self, result: SearchResult) -> Throughput | None:
        """Time sizes up to the largest, or with a target the plans of such sizes; None where none runs."""
        plans = self._plans(result.max_batch_size)
        probe, _ = self._open()

        def rate(size: int) -> float | None:
            trial = Trial(size, result.shape, probe(size, result.shape))
            self._timed.append(trial)
            if self._on_trial is not None:
                self._on_trial(trial)
            step, earlier = trial.measurement.step_seconds, trial.measurement.micro_batch_seconds
            if not trial.fits or step is None:
                return None
            plan = plans[size]
            count = self._limits.accumulation if plan is None else plan.accumulation
            return count * size / (step + (count - 1) * (step if earlier is None else earlier))

        self._time_steps(_TIMED_STEPS)
        try:
            return find_full_speed(sorted(plans), rate)
        finally:
            self._time_steps(0)

    def _search(
        self, shape: Shape, known: SearchResult | None, again: Trial | None
    ) -> tuple[SearchResult, Trial | None]:
        """Search, and try the answer again where trials after it have left less memory than it takes.

        Args:
            shape: what is searched for.
            known: what is cached, if anything.
            again: the trial of what is cached, from which the search goes on: down, or up; None where there was none.

        Returns:
            The result, and the last trial of a size that had run before and failed: that of what is cached, or one of
            this search.
        """
        failed = again if again is not None and not again.fits else None
        tolerance, start = self._limits.tolerance, 0
        hinted: Prediction | None = None
        while True:
            limits = self._limits
            probe, max_peak_bytes = self._open()
            then = None if known is None else known.free_bytes
            share = self._free_bytes / then if then else 1.0
            trials: tuple[Trial, ...] = ()
            if failed is not None:
                predicted: Prediction | None = Prediction(int(min(share, _BELOW_A_FAILURE) * failed.batch_size))
                # Not those that ran before an earlier failure: memory may be gone since, for all of them.
                since, start = self._trials[start:], len(self._trials)
                ran = {t.batch_size: t for t in since if t.fits and t.batch_size < failed.batch_size}
                trials = (*(ran[size] for size in sorted(ran)), failed)
            elif again is not None:
                predicted, trials = None, (again,)
            else:
                if hinted is None and self._hint is not None:
                    hinted = self._hint(shape, self._bounds, max_peak_bytes)
                predicted = hinted
                if predicted is None and known is not None and known.max_batch_size:
                    predicted = Prediction(int(share * known.max_batch_size))
            search: Search[Any] = Secant(max_peak_bytes, min(tolerance, 0.5), *(predicted or ()))
            search = Floored(Multiples(search, limits.multiple_of), limits.min_batch_size)
            if limits.cap is not None:
                search = Capped(search, limits.cap)
            raised: Exception | None = None
            try:
                found = find_max_batch_size(
                    probe, shape, search=search, before_trial=self._asking, on_trial=self._tried, trials=trials
                )
            except Exception as error:
                if isinstance(error, BatchFinderError) and not isinstance(error, UserCodeFailed | RankFailed):
                    raise
                if not self._limits.from_two or self._bounds.last == 1:
                    raise
                raised = error
            if raised is not None:
                try:
                    # It may be for want of a second sample, as BatchNorm's and pair losses' errors are.
                    if self._asked > 1 or any(trial.fits for trial in self._trials):
                        self._go_on_in_multiples(raised, self._asked, shape)
                    else:
                        self._go_on_from_two(raised, shape)
                finally:
                    raised = None  # whose traceback has this frame: a cycle
                continue
            # Trials after it may have left less than it takes, as oneDNN's kernels for each new shape do on a CPU.
            peak = None if found.measurement is None else found.measurement.peak_reserved_bytes
            last = self._trials[-1].batch_size == found.max_batch_size
            if found.max_batch_size == 0 or last or peak is None or peak <= self._open()[1]:
                return found, failed
            again = self._try(found.max_batch_size, shape)
            if again.fits:
                return replace(found, measurement=again.measurement), failed
            failed, tolerance = again, max(tolerance, min(2 * tolerance, _MOST_AFTER_A_LEAK), _AFTER_A_LEAK)

    def _go_on_from_two(self, raised: Exception, shape: Shape) -> None:
        """Search from 2 samples on where they run and 1 raises each time.

        Raises:
            Exception: `raised`, where 2 raise as well, or 1 runs now.
        """
        after = self._bounds.after(1)
        try:
            if self._raises(after, shape) or not self._raises(1, shape):
                raise raised
            self._raised = _words_of(raised)
        finally:
            del raised  # whose traceback has this frame: a cycle
        self._limits = replace(self._limits, min_batch_size=after)
        self._bounds = self._limits.bounds

    def _go_on_in_multiples(self, raised: Exception, size: int, shape: Shape) -> None:
        """Search multiples of a number where a size raises that is none, and all that ran are, and the next two run.

        A step that pairs samples, or that deals them out, refuses other sizes, which the user does not train with.

        Raises:
            Exception: `raised`, where there is no such number.
        """
        limits, ran = self._limits, [trial.batch_size for trial in self._trials if trial.batch_size != size]
        raises: dict[int, bool] = {}
        try:
            for multiple in _MULTIPLES:
                fitting = size - size % multiple
                target = limits.target_batch_size or 0
                if fitting in (0, size) or multiple % limits.multiple_of or target % (multiple * limits.num_devices):
                    continue
                # The one below as well, which is a multiple of fewer other numbers.
                both = [other for other in (fitting, fitting - multiple) if other >= self._bounds.first]
                if any(other % multiple for other in ran):
                    continue
                for other in both:
                    if other not in raises:
                        raises[other] = self._raises(other, shape)
                if not any(raises[other] for other in both):
                    break
            else:
                raise raised
            self._refused = f"in multiples of {multiple}, since batch size {size} raised {_words_of(raised)}"
        finally:
            del raised  # whose traceback has this frame: a cycle
        self._limits = replace(limits, multiple_of=multiple)
        self._bounds = self._limits.bounds

    def _open(self) -> tuple[Probe, int]:
        opened = self._open_probe()
        if not self._opened:
            # A child process knows better what is free than whoever was asked before it started.
            self._opened = True
            self._free_bytes = min(self._free_bytes, max(0, self._ask_free_bytes() - self._limits.reserve_bytes))
        return opened

    def _try(self, batch_size: int, shape: Shape) -> Trial:
        """Try one size; twice if it fails in a way that may pass."""
        probe, max_peak_bytes = self._open()
        search = Floored(Capped(Secant(max_peak_bytes), batch_size), batch_size)
        return find_max_batch_size(probe, shape, search=search, on_trial=self._tried).trials[-1]

    def _raises(self, batch_size: int, shape: Shape) -> bool:
        """Whether the user's code raises at a size something that is not about memory."""
        try:
            self._try(batch_size, shape)
        except Exception as error:
            if isinstance(error, BatchFinderError) and not isinstance(error, UserCodeFailed | RankFailed):
                raise
            return True
        return False

    def _asking(self, batch_size: int) -> None:
        self._asked = batch_size

    def _tried(self, trial: Trial) -> None:
        self._trials.append(trial)
        if self._on_trial is not None:
            self._on_trial(trial)

    def _plan_within(self, batch_size: int) -> AccumulationPlan | None:
        """The plan of micro-batches up to a size; None without a target."""
        limits = self._limits
        if limits.target_batch_size is None:
            return None
        return plan_accumulation(
            limits.target_batch_size,
            batch_size,
            limits.num_devices,
            min_batch_size=self._bounds.first,
            multiple_of=limits.multiple_of,
            exact=limits.exact,
        )

    def _plans(self, largest: int) -> dict[int, AccumulationPlan | None]:
        """Micro-batches up to a size to choose from at full speed, each with its plan; None without a target."""
        plans: dict[int, AccumulationPlan | None] = {}
        for size in sizes_to_time(largest, self._bounds):
            try:
                plan = self._plan_within(size)
            except InvalidValue:  # the target cannot be made up of such small ones
                continue
            plans.setdefault(size if plan is None else plan.micro_batch_size, plan)
        return plans

    def _plan(self, result: SearchResult, throughput: Throughput | None) -> AccumulationPlan | None:
        """The plan whose micro-batch was itself tried, since a smaller size does not always take less."""
        limit = result.max_batch_size
        if self._limits.target_batch_size is None or limit == 0:
            return None
        if throughput is not None:
            plan = self._plans(limit).get(throughput.batch_size)
            if plan is not None:
                return plan
            limit = throughput.batch_size  # timed for another plan
        seen = {trial.batch_size: trial for trial in (*result.trials, *self._trials)}
        while (plan := self._plan_within(limit)) is not None:
            trial = seen.get(plan.micro_batch_size) or self._try(plan.micro_batch_size, result.shape)
            if trial.fits:
                break
            limit = plan.micro_batch_size - 1
            if limit < self._bounds.first:
                raise _out_of_memory(trial, self._limit_bytes - self._limits.reserve_bytes, self._held_bytes)
        return plan

    @contextmanager
    def _cache_errors(self) -> Iterator[None]:
        """Warn once of a cache that cannot be used: one that cannot be read cannot be written either."""
        try:
            yield
        except CacheFailed as error:
            if self._warn is None:
                raise
            if not self._cache_failed:
                self._warn(error)
            self._cache_failed = True


def _words_of(raised: Exception) -> str:
    """What the user's code raised, on one line."""
    if isinstance(raised, UserCodeFailed):
        return shortened(raised.traceback.rstrip().splitlines()[-1])
    return shortened(f"{type(raised).__name__}: {raised}".splitlines()[0])


def _out_of_memory(trial: Trial, limit_bytes: int, held_bytes: int | None) -> OutOfMemory:
    seq_len, words = trial.shape.seq_len, trial.measurement.message or trial.measurement.verdict.value
    shorter = "" if seq_len is None else f" or sequences shorter than {seq_len}"
    held = "" if held_bytes is None else f", of which {format_bytes(held_bytes)} were held before the first try"
    return OutOfMemory(
        trial.batch_size,
        f"{words.rstrip('.')}. The limit is {format_bytes(limit_bytes)}{held}. Try a smaller model{shorter}, a lower "
        "precision, activation checkpointing or an optimizer with less state.",
    )
