"""A model's cells by real training steps: one child process for all of them, the longest sequence first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.cli.sweep_cells import Cell, ModelCells, cache_key, less
from batchfinder.cli.sweep_request import CPU, available_bytes
from batchfinder.errors import BatchFinderError
from batchfinder.find import find_max_batch_size
from batchfinder.measure.child_probe import ChildProcessProbe, CpuProbe
from batchfinder.measure.tuner import SLACK, holds
from batchfinder.recording.simulation import search_simulated
from batchfinder.results import SearchResult, Shape, Stop, Trial
from batchfinder.search import Capped, Search, Secant
from batchfinder.simulator.probe import SimulatedProbe

_AFTER_A_FAILURE = 0.95
"""Of a known answer that no longer runs, where to look next."""

_NEED_IS_SIMULATED = "what a single sample needs is simulated"
# What changes the number of PyTorch's threads, whose stacks count, or the memory allocator.
_CPU_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "LD_PRELOAD")


def measure_cells(cells: ModelCells, doing: Callable[[str], object], found: Callable[[Cell], object]) -> None:
    """Find every cell of a model on the one card of the request, the longest sequence first.

    So what shorter ones leave cannot be in its way.

    Args:
        cells: what to find; the simulation is for predictions.
        doing: is told what is being done.
        found: is told of each cell.

    Raises:
        ContextDied: the user's code killed the card's context, twice.
        ProbeDied: the child process ended, twice, and not for want of memory.
        UserCodeFailed: the user's code raised.
    """
    with MeasuredCells(cells) as measuring:
        for seq_len in sorted(cells.seq_lens, key=lambda length: length or 0, reverse=True):
            found(measuring.cell(seq_len, doing))


class MeasuredCells:
    """The real steps of one model on one device.

    Args:
        cells: that will be asked for.
    """

    def __init__(self, cells: ModelCells) -> None:
        self._cells = cells
        self._request = request = cells.request
        (self._card,) = request.cards
        self._place = request.place
        self._step = cells.simulation.spec, request.how.settings()
        self._facts = cells.simulation.facts()
        self._reserve_bytes = request.reserve_bytes(self._card)
        self._probe: ChildProcessProbe | None = None
        self._recordable = True
        self._longer: SearchResult | None = None

    def __enter__(self) -> MeasuredCells:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._probe is not None:
            self._probe.close()

    def cell(self, seq_len: int | None, doing: Callable[[str], object]) -> Cell:
        """What is known of a length, where it still holds or runs again; else what a search finds.

        Args:
            seq_len: tokens per sample; None for data of one fixed shape.
            doing: is told what is being done.
        """
        start = time.perf_counter()
        name = self._cells.name(seq_len, self._card)
        doing(name)
        trials: list[Trial] = []

        def tried(trial: Trial) -> None:
            trials.append(trial)
            doing(f"{name}: {trial.batch_size} {'runs' if trial.fits else 'does not run'}")

        cache = self._request.cache
        slot = None if cache is None else cache.slot(self._key(seq_len), self._cells.model)
        known = slot.get() if slot is not None else None
        if known is not None and _outgrown(known, self._room()):
            known = None
        cached = known is not None and holds(known, self._room())
        outcome = known if known is None or cached else self._again(known, tried)
        if outcome is None:
            outcome = self._search(Shape(seq_len), tried, _failed(trials))
        if slot is not None and not cached:
            slot.put(outcome)
        self._longer = None if outcome.stop is Stop.CAP else outcome
        seconds = time.perf_counter() - start
        return Cell(self._cells.model, self._facts, self._card, outcome, tuple(trials), seconds, cached)

    def _again(self, known: SearchResult, tried: Callable[[Trial], object]) -> SearchResult | None:
        """A known answer that was tried once more; None when it does not run any more, or was 0."""
        if known.max_batch_size == 0:
            return None
        probe = self._prober()
        trial = Trial(known.max_batch_size, known.shape, probe(known.max_batch_size, known.shape))
        tried(trial)
        return replace(known, measurement=trial.measurement, free_bytes=self._room()) if trial.fits else None

    def _search(self, shape: Shape, tried: Callable[[Trial], object], failed: int | None) -> SearchResult:
        probe = self._prober()
        guesses = [self._predicted(shape), None if failed is None else int(_AFTER_A_FAILURE * failed)]
        predicted = min((guess for guess in guesses if guess is not None), default=None)
        search: Search[Any] = Secant(self._room(), self._request.tolerance, predicted)
        if self._request.max_batch_size is not None:
            search = Capped(search, self._request.max_batch_size)
        outcome = find_max_batch_size(probe, shape, search=search, on_trial=tried)
        outcome = replace(outcome, free_bytes=self._room())
        return outcome if outcome.max_batch_size else self._with_needs(outcome)

    def _with_needs(self, outcome: SearchResult) -> SearchResult:
        """What a single sample would take: tried where there is more memory than may be used, else simulated."""
        shape, seen = outcome.shape, outcome.measurement
        if self._place.device == CPU:
            with CpuProbe(*self._step, max(1, available_bytes()), flash=self._request.how.flash) as probe:
                needed = probe(1, shape).peak_reserved_bytes
            unmodelled: tuple[str, ...] = ()
        else:
            needed, unmodelled = self._simulated(lambda probe: probe.needed_bytes(1, shape)), (_NEED_IS_SIMULATED,)
        if needed is None or seen is None:
            return outcome
        seen = replace(seen, needed_bytes=needed)
        return replace(outcome, measurement=seen, unmodelled=(*outcome.unmodelled, *unmodelled))

    def _predicted(self, shape: Shape) -> int | None:
        """What the simulated step says; where it says nothing, as of a CPU, what the length before gives."""
        cap, simulated = self._request.max_batch_size, None
        if self._place.device != CPU:
            simulated = self._simulated(lambda probe: search_simulated(probe, shape, cap).max_batch_size)
        return self._scaled(shape) if simulated is None else simulated

    def _scaled(self, shape: Shape) -> int | None:
        """The answer for the length before, as if a sample's memory grew with its tokens or pixels.

        It grows no slower, and the length before was longer, so this errs on the low side, which costs no failure.
        """
        if self._longer is None or not self._longer.max_batch_size:
            return None
        ratio = (self._longer.shape.seq_len or 1) / (shape.seq_len or 1)
        return int(self._longer.max_batch_size * ratio ** (2 if self._facts.seq_len_unit == "pixels" else 1))

    def _simulated(self, ask: Callable[[SimulatedProbe], int]) -> int | None:
        """Something of the simulated step; None where it cannot be recorded. Real steps tell whose fault that is."""
        if self._recordable:
            device = less(self._card.device, self._reserve_bytes)
            try:
                return ask(self._cells.simulation.probe(device, self._cells.seq_lens, self._request.allocator))
            except BatchFinderError:
                self._recordable = False
        return None

    def _prober(self) -> ChildProcessProbe:
        """The child process, started when it is first needed; what is free of the card is asked anew then."""
        if self._probe is not None:
            return self._probe
        flash = self._request.how.flash
        if self._place.device == CPU:
            self._probe = CpuProbe(*self._step, self._room(), flash=flash)
            return self._probe
        self._probe = ChildProcessProbe(*self._step, self._place.device, flash=flash)
        free_bytes = self._probe.look().free_bytes
        budget = self._place.budget
        usable_bytes = free_bytes if budget is None else budget.of(free_bytes)
        self._card = replace(self._card, device=replace(self._card.device, usable_bytes=usable_bytes))
        # Without a limit the driver's own out-of-memory is the answer.
        self._probe.limit_bytes = self._room() if budget is not None or self._reserve_bytes else None
        return self._probe

    def _room(self) -> int:
        """What a peak may come to."""
        return less(self._card.device, self._reserve_bytes).usable_bytes

    def _key(self, seq_len: int | None) -> CacheKey:
        """Everything that changes the answer, but for what else is on the card."""
        place, request = self._place, self._request
        simulated = cache_key(self._facts, self._card, seq_len, request)
        if place.device == CPU:
            extra: dict[str, Json] = {"device": CPU, "threads": len(os.sched_getaffinity(0))}
            extra |= {name: os.environ[name] for name in _CPU_ENVIRONMENT if name in os.environ}
        else:
            extra = {"device": "cuda", "capability": self._card.device.compute_capability}
        return replace(
            simulated,
            usable_bytes=place.allowance_bytes,
            allocator={} if place.device == CPU else simulated.allocator,
            tolerance=request.tolerance,
            source=ChildProcessProbe.source,
            versions={**self._facts.versions, **place.versions},
            extra=extra,
        )


def _failed(trials: list[Trial]) -> int | None:
    """The size of an answer that was tried again and did not run."""
    return trials[-1].batch_size if trials else None


def _outgrown(known: SearchResult, max_peak_bytes: int) -> bool:
    """Whether so much more is free than when memory set the answer that a larger size may run now."""
    then = known.free_bytes
    return known.stop is not Stop.CAP and then is not None and max_peak_bytes > then + int(SLACK * then)
