"""The cells of one model, found by real steps: in one child process for all of them, the longest sequence first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TypeVar

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.cuda_stub import StubSession
from batchfinder.devices import Card
from batchfinder.errors import BatchFinderError, CacheFailed
from batchfinder.measure.child_probe import ChildProcessProbe, CpuProbe
from batchfinder.measure.host_limits import available_bytes, soft_limit
from batchfinder.measure.tuner import SearchLimits, Tuner
from batchfinder.probe import Probe
from batchfinder.recording.answers import predict_full_card
from batchfinder.report.sweep import Cell, SweepRow
from batchfinder.results import SearchResult, Shape, StopReason
from batchfinder.search import Bounds, Prediction
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.sizing.cells import ModelCells, cache_key
from batchfinder.sizing.sweep_request import CPU
from batchfinder.stub_cards import card_of_device, open_session

T = TypeVar("T")

_NEED_IS_SIMULATED = "what a single sample needs is simulated"
# What changes the number of PyTorch's threads, whose stacks count, or the memory allocator.
_CPU_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "LD_PRELOAD")


def measure_cells(cells: ModelCells, status: Callable[[str], object]) -> Iterator[SweepRow]:
    """Find every cell of a model on each device of the request, the longest sequence first; as `simulate_cells`.

    So memory that shorter ones leave behind cannot be in its way. The simulation is for predictions.

    Raises:
        ContextDied: the user's code killed the CUDA context, twice.
        ProbeDied: the child process ended, twice, and not for want of memory.
        UserCodeFailed: the user's code raised.
    """
    for card in cells.request.place.cards:
        with closing(MeasuredCells(cells, card, status)) as measured:
            for seq_len in sorted(cells.seq_lens, key=lambda length: length or 0, reverse=True):
                yield measured.row(seq_len)


class MeasuredCells:
    """The cells of one model on one device, found by real steps."""

    def __init__(self, cells: ModelCells, card: Card, status: Callable[[str], object]) -> None:
        self._cells = cells
        self._status = status
        self._request = request = cells.request
        self._card = card
        self._stub: StubSession | None = None
        self._place = request.place
        self._step = cells.simulation.spec, request.step
        self._facts = cells.simulation.facts()
        self._probe: ChildProcessProbe | None = None
        self._cell = cells.cell(None, self._card)
        self._recordable = True
        self._longer: SearchResult | None = None
        self._seen: list[str] = []  # of the cell, what came of each size
        self._tries = 0
        self._not_cached = ""
        self._limits = SearchLimits(
            request.max_batch_size,
            request.tolerance,
            reserve_bytes=request.reserve_bytes(self._card),
            min_batch_size=request.min_batch_size,
            multiple_of=request.multiple_of,
            certify=request.certify,
            goal="throughput" if request.throughput else "memory",
            accumulation=request.step.micro_batches,
        )
        self._tuner = Tuner(
            self.free_bytes,
            self._limits,
            self._open_probe,
            hint=self._predicted,
            on_trial=lambda trial: self._seen.append(f"{trial.batch_size} {'runs' if trial.fits else 'does not run'}"),
            warn=self._cannot_cache,
            time_steps=self._time_steps,
        )

    @property
    def _source(self) -> str:
        return "stub" if self._place.on_stub else ChildProcessProbe.source

    def close(self) -> None:
        """End the child process."""
        if self._probe is not None:
            self._probe.close()
        if self._stub is not None:
            self._stub.close()

    def _time_steps(self, steps: int) -> None:
        """Have the child, which has been started, time so many steps at least in each try from now on."""
        if self._probe is not None:
            self._probe.timed_steps = steps

    def _cannot_cache(self, error: CacheFailed) -> None:
        self._not_cached = str(error)

    def _say_try(self, batch_size: int) -> None:
        self._tries += 1
        last = f" ({self._seen[-1]})" if self._seen else ""
        self._status(f"{self._cell}: try {self._tries}, batch size {batch_size}{last}")

    def free_bytes(self) -> int:
        """What may be used of the device now."""
        return self._card.device.usable_bytes

    def row(self, seq_len: int | None) -> SweepRow:
        """Find the largest batch size for a length; None for data of one fixed shape."""
        self._cell = cell = self._cells.cell(seq_len, self._card)
        self._seen, self._tries = [], 0
        cache = self._request.cache
        entry = None if cache is None else cache.entry(self._key(cell), self._cells.model)
        found = self._tuner.find(Shape(seq_len), entry)
        if found.raised:
            self._cell = cell = replace(cell, min_batch_size=2)
        cached, trials = found.result.source == "cache", found.result.trials
        result = replace(found.result, source=self._source, trials=(*found.earlier_trials, *trials))
        if self._stub is not None:
            result = replace(result, unmodelled=(*result.unmodelled, *self._stub.report().words()))
        need_source = ""
        if result.max_batch_size == 0 and result.measurement is not None:
            # What the smallest size would take: tried where there is more memory than may be used, else simulated.
            unmodelled: tuple[str, ...] = ()
            if self._place.device == CPU:
                with CpuProbe(*self._step, max(1, available_bytes() or 0)) as probe:
                    needed = probe(cell.smallest, result.shape).peak_reserved_bytes
            else:
                needed = self._simulated(lambda probe: probe.needed_bytes(cell.smallest, result.shape))
                unmodelled, need_source = (_NEED_IS_SIMULATED,), "simulated"
            if needed is not None:
                seen = replace(result.measurement, needed_bytes=needed)
                result = replace(result, measurement=seen, unmodelled=(*result.unmodelled, *unmodelled))
        self._longer = None if result.stop is StopReason.CAP else result
        row = SweepRow(replace(cell, card=self._card), result, trials, found.seconds, cached, raised=found.raised)
        return replace(row, throughput=found.throughput, not_cached=self._not_cached, need_source=need_source)

    def _predicted(self, shape: Shape, bounds: Bounds, max_peak_bytes: int) -> Prediction | None:
        """The simulated step's answer; on a CPU, or where it cannot be recorded, one scaled from the length before.

        A sample's memory grows no slower than its tokens or pixels, and the length before was longer, so that one errs
        on the low side, which costs no failure.
        """
        if self._place.device != CPU:
            most = self._request.max_batch_size
            simulated = self._simulated(lambda probe: predict_full_card(probe, shape, most))
            if simulated is not None:
                return simulated
        if self._longer is None or not self._longer.max_batch_size:
            return None
        ratio = (self._longer.shape.seq_len or 1) / (shape.seq_len or 1)
        if self._facts.seq_len_unit == "pixels":
            ratio *= ratio
        return Prediction(int(self._longer.max_batch_size * ratio))

    def _simulated(self, ask: Callable[[SimulatedProbe], T]) -> T | None:
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
            variables = None
            if self._place.on_stub:
                self._stub = open_session([card_of_device(self._card.device)])
                variables = self._stub.variables()
            self._probe = ChildProcessProbe(*self._step, self._place.device, environment=variables)
            usable_bytes = self._place.within_budget(self._probe.query_gpu().free_bytes)
            self._card = replace(self._card, device=replace(self._card.device, usable_bytes=usable_bytes))
            max_peak_bytes = self._card.device.with_headroom(reserve).usable_bytes
            # Without a limit the driver's own out-of-memory is the answer.
            limited = self._place.budget_bytes is not None or reserve > 0
            self._probe.limit_bytes = max_peak_bytes if limited else None
        self._probe.on_try = self._say_try
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
            if self._place.on_stub:
                extra["device"] = "cuda stub"
        extra |= cell.options.newer()
        return replace(
            simulated,
            usable_bytes=place.within_budget(card=self._card),
            allocator={} if place.device == CPU else simulated.allocator,
            tolerance=request.tolerance,
            source=self._source,
            versions={**self._facts.versions, **place.versions},
            extra=extra,
        )
