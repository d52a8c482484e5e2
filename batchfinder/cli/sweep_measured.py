"""A model's cells by real training steps: one child process for all of them, the longest sequence first."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.cli.sweep_cells import ModelCells, cache_key
from batchfinder.cli.sweep_request import CPU
from batchfinder.errors import BatchFinderError
from batchfinder.measure.child_probe import ChildProcessProbe, CpuProbe
from batchfinder.measure.host_limits import available_bytes, soft_limit
from batchfinder.measure.tuner import SearchLimits, Tuner
from batchfinder.probe import Probe
from batchfinder.recording.simulation import search_simulated
from batchfinder.report.sweep import Cell, SweepRow
from batchfinder.results import SearchResult, Shape, StopReason
from batchfinder.simulator.steady_state import SimulatedProbe

_NEED_IS_SIMULATED = "what a single sample needs is simulated"
# What changes the number of PyTorch's threads, whose stacks count, or the memory allocator.
_CPU_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "LD_PRELOAD")


def measure_cells(cells: ModelCells, status: Callable[[str], object], found: Callable[[SweepRow], object]) -> None:
    """Find every cell of a model on the one device of the request, the longest sequence first.

    So memory that shorter ones leave behind cannot be in its way. The simulation is for predictions. `status` is given
    lines on what is being done, `found` each row.

    Raises:
        ContextDied: the user's code killed the CUDA context, twice.
        ProbeDied: the child process ended, twice, and not for want of memory.
        UserCodeFailed: the user's code raised.
    """
    with closing(MeasuredCells(cells, status)) as measured:
        for seq_len in sorted(cells.seq_lens, key=lambda length: length or 0, reverse=True):
            found(measured.row(seq_len))


class MeasuredCells:
    """The cells of one model on one device, found by real steps."""

    def __init__(self, cells: ModelCells, status: Callable[[str], object]) -> None:
        self._cells = cells
        self._status = status
        self._request = request = cells.request
        (self._card,) = request.place.cards
        self._place = request.place
        self._step = cells.simulation.spec, request.step
        self._facts = cells.simulation.facts()
        self._probe: ChildProcessProbe | None = None
        self._cell = cells.cell(None, self._card)
        self._recordable = True
        self._longer: SearchResult | None = None
        self._limits = SearchLimits(
            request.max_batch_size,
            request.tolerance,
            reserve_bytes=request.reserve_bytes(self._card),
            min_batch_size=request.min_batch_size,
            multiple_of=request.multiple_of,
            certify=request.certify,
        )
        self._tuner = Tuner(
            self.free_bytes,
            self._limits,
            self._open_probe,
            hint=self._predicted,
            on_trial=lambda trial: status(
                f"{self._cell}: {trial.batch_size} {'runs' if trial.fits else 'does not run'}"
            ),
        )

    def close(self) -> None:
        """End the child process."""
        if self._probe is not None:
            self._probe.close()

    def free_bytes(self) -> int:
        """What may be used of the device now."""
        return self._card.device.usable_bytes

    def row(self, seq_len: int | None) -> SweepRow:
        """Find the largest batch size for a length; None for data of one fixed shape."""
        self._cell = cell = self._cells.cell(seq_len, self._card)
        self._status(str(cell))
        cache = self._request.cache
        entry = None if cache is None else cache.entry(self._key(cell), self._cells.model)
        found = self._tuner.find(Shape(seq_len), entry)
        if found.raised:
            self._cell = cell = replace(cell, min_batch_size=2)
        cached, trials = found.result.source == "cache", found.result.trials
        result = replace(found.result, source=ChildProcessProbe.source, trials=(*found.earlier_trials, *trials))
        if result.max_batch_size == 0 and result.measurement is not None:
            # What the smallest size would take: tried where there is more memory than may be used, else simulated.
            unmodelled: tuple[str, ...] = ()
            if self._place.device == CPU:
                with CpuProbe(*self._step, max(1, available_bytes() or 0)) as probe:
                    needed = probe(cell.smallest, result.shape).peak_reserved_bytes
            else:
                needed = self._simulated(lambda probe: probe.needed_bytes(cell.smallest, result.shape))
                unmodelled = (_NEED_IS_SIMULATED,)
            if needed is not None:
                seen = replace(result.measurement, needed_bytes=needed)
                result = replace(result, measurement=seen, unmodelled=(*result.unmodelled, *unmodelled))
        self._longer = None if result.stop is StopReason.CAP else result
        return SweepRow(replace(cell, card=self._card), result, trials, found.seconds, cached, raised=found.raised)

    def _predicted(self, shape: Shape, max_peak_bytes: int) -> int | None:
        """The simulated step's answer; on a CPU, or where it cannot be recorded, one scaled from the length before.

        A sample's memory grows no slower than its tokens or pixels, and the length before was longer, so that one errs
        on the low side, which costs no failure.
        """
        if self._place.device != CPU:
            request = self._request
            sizes = request.max_batch_size, request.min_batch_size, request.multiple_of
            simulated = self._simulated(lambda probe: search_simulated(probe, shape, *sizes).max_batch_size)
            if simulated is not None:
                return simulated
        if self._longer is None or not self._longer.max_batch_size:
            return None
        ratio = (self._longer.shape.seq_len or 1) / (shape.seq_len or 1)
        return int(self._longer.max_batch_size * ratio ** (2 if self._facts.seq_len_unit == "pixels" else 1))

    def _simulated(self, ask: Callable[[SimulatedProbe], int]) -> int | None:
        """A figure of the simulated step; None where it cannot be recorded. Real steps show whose fault that is."""
        if self._recordable:
            device = self._card.device.with_headroom(self._limits.reserve_bytes)
            try:
                return ask(self._cells.simulation.probe(device, self._cells.seq_lens, self._request.allocator))
            except BatchFinderError:
                self._recordable = False
        return None

    def _open_probe(self) -> tuple[Probe, int]:
        """The child process, started when it is first needed, and what a peak may come to.

        What is free of a GPU is asked anew by the child that takes the steps.
        """
        reserve = self._limits.reserve_bytes
        max_peak_bytes = self._card.device.with_headroom(reserve).usable_bytes
        if self._probe is None and self._place.device == CPU:
            self._probe = CpuProbe(*self._step, max_peak_bytes)
        elif self._probe is None:
            self._probe = ChildProcessProbe(*self._step, self._place.device)
            usable_bytes = self._place.within_budget(self._probe.query_gpu().free_bytes)
            self._card = replace(self._card, device=replace(self._card.device, usable_bytes=usable_bytes))
            max_peak_bytes = self._card.device.with_headroom(reserve).usable_bytes
            # Without a limit the driver's own out-of-memory is the answer.
            limited = self._place.budget_bytes is not None or reserve > 0
            self._probe.limit_bytes = max_peak_bytes if limited else None
        return self._probe, max_peak_bytes

    def _key(self, cell: Cell) -> CacheKey:
        """Everything that changes the answer, but for what else is on the device."""
        place, request = self._place, self._request
        simulated = cache_key(cell, self._facts, request)
        if place.device == CPU:
            extra: dict[str, Json] = {"device": CPU, "threads": len(os.sched_getaffinity(0))}
            extra |= {name: os.environ[name] for name in _CPU_ENVIRONMENT if name in os.environ}
            limit = soft_limit("RLIMIT_AS")
            if limit is not None:
                extra["RLIMIT_AS"] = limit
        else:
            extra = {"device": "cuda", "capability": self._card.device.compute_capability}
        return replace(
            simulated,
            usable_bytes=place.within_budget(),
            allocator={} if place.device == CPU else simulated.allocator,
            tolerance=request.tolerance,
            source=ChildProcessProbe.source,
            versions={**self._facts.versions, **place.versions},
            extra=extra,
        )
