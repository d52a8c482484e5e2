"""The cells of one model in a sweep: what each is asked, its cache key, and finding it by simulation or by real steps.

Real steps are taken in one child process for all of a model's cells, the longest sequence first.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.cache.store import ResultEntry
from batchfinder.cuda_stub import StubSession
from batchfinder.devices import Card, find_gpu
from batchfinder.devices.training_cost import TrainingCost
from batchfinder.errors import BatchFinderError, CacheFailed, InvalidValue, RecordingFailed
from batchfinder.measure.child_probe import ChildProcessProbe, CpuProbe
from batchfinder.measure.host_limits import available_bytes, soft_limit
from batchfinder.measure.tuner import SearchLimits, Tuner
from batchfinder.memory_use.breakdown import bytes_over_time
from batchfinder.probe import Probe
from batchfinder.recording.simulation import (
    Simulation,
    check_scaling,
    predict_full_card,
    search_cards,
    search_simulated,
)
from batchfinder.recording.what_fits import FitSearch
from batchfinder.report.estimate import Alternative, EstimateRequest
from batchfinder.report.sweep import Cell, SweepRow
from batchfinder.report.terminal import words_of
from batchfinder.reproductions.published import published_titan_x
from batchfinder.results import SearchResult, Shape, StopReason
from batchfinder.search import Prediction
from batchfinder.simulator.alloc_conf import CUBLAS_WORKSPACES
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.sizing.alternatives import as_typed, single_changes
from batchfinder.sizing.sweep_request import CPU, SweepRequest
from batchfinder.stub_cards import card_of_device, open_session
from batchfinder.training.spec import CUDA_BUILD, FAKE_DEVICE, OWN_OPTIMIZER, StepOptions, WorkloadFacts

T = TypeVar("T")

_TITANS = ("Titan X Pascal", "GTX Titan X")
_CARDS_WITH_CHANGES = 4
"""A page of more GPUs has no table of changes: each takes a search for each cell."""
_CELLS_WITH_WHAT_FITS = 2
"""Of a model's cells in which not one sample fits: those for which options are looked for under which it does."""
CARDS_OF_A_POOL = 8
"""For fewer GPUs `search_pool` is of no use: its processes take as long to start."""
_OBJECTS_OF_REPLAYS = 20_000
"""New objects after which a process of `search_pool` looks for garbage: replays make many and leave none.

By Python's own 700 it took a tenth of the time.
"""
_OF_A_KIND = InvalidValue, RecordingFailed
"""What is raised where a GPU of a kind cannot do what is asked for, as flash attention on a T4."""
_CURVE_POINTS, _CURVE_END = 12, 1.15
"""Of a curve for the picture: how many steps, and how far it goes, as a multiple of the result."""


@dataclass(frozen=True)
class ModelCells:
    """The cells of one model, still to be found.

    Attributes:
        pool: searches some of them; None without one.
    """

    model: str
    simulation: Simulation
    seq_lens: tuple[int | None, ...]
    request: SweepRequest
    pool: Executor | None = None

    def cell(self, seq_len: int | None, card: Card) -> Cell:
        """One of the cells."""
        request, options = self.request, self.request.options
        # The published figures are for a whole Titan X of 12 GB, training in fp32 with Adam.
        usual = replace(options, attention=None, recorder=FAKE_DEVICE) == StepOptions()
        like_published = card.name in _TITANS and usual
        published = published_titan_x().get((self.model, seq_len or 0))
        if self.simulation.facts().brings_optimizer:
            options = replace(options, optimizer=OWN_OPTIMIZER)
        if options.gpus > 1:
            options = replace(options, gpus=card.count)
        return Cell(
            model=self.model,
            seq_len=seq_len,
            card=card,
            options=options,
            headroom_bytes=request.reserve_bytes(card),
            target_batch_size=request.target_batch_size,
            min_batch_size=request.min_batch_size,
            multiple_of=request.multiple_of,
            exact=request.exact,
            published=published if like_published and options.attention != "flash" else None,
        )


def cache_key(cell: Cell, facts: WorkloadFacts, request: SweepRequest) -> CacheKey:
    """Everything that changes a simulated cell's result."""
    device, options = cell.card.device, cell.options
    workspaces = {name: os.environ[name] for name in (CUBLAS_WORKSPACES,) if name in os.environ}
    return CacheKey(
        model=facts.fingerprint,
        gpu=device.name,
        total_bytes=device.total_bytes,
        usable_bytes=device.usable_bytes,
        seq_len=cell.seq_len,
        mode=options.mode,
        precision=options.precision,
        optimizer=options.optimizer,
        optimizer_options={},
        attention=options.attention or "",
        gradient_checkpointing=bool(options.gradient_checkpointing),
        accumulation=request.step.micro_batches,
        allocator=asdict(request.allocator) | workspaces,
        max_batch_size=request.max_batch_size,
        floor=request.min_batch_size,
        multiple_of=request.multiple_of,
        tolerance=0.0,
        headroom_bytes=cell.headroom_bytes,
        source="simulated",
        versions=facts.versions,
        extra={"capability": device.compute_capability, "multiprocessors": device.reduces_on.number, **options.newer()},
    )


def simulate_cells(cells: ModelCells, status: Callable[[str], object]) -> Iterator[SweepRow]:
    """Find every cell of a model, and yield each row as it is found; `status` is given lines on what is being done.

    Raises:
        BatchFinderError: the model could not be recorded. Where that may be for a compute capability or a number of
            GPUs alone, the cells of others are found first.
    """
    request, facts = cells.request, cells.simulation.facts()
    simulations: dict[int, Simulation] = {}
    if request.options.gpus > 1:
        simulations = cells.simulation.on_several({card.count for card in request.place.cards})
    changed: dict[StepOptions, Simulation] = {}
    capabilities = sorted({card.device.compute_capability for card in request.place.cards})
    recorded: set[int] = set()
    limits = request.max_batch_size, request.min_batch_size, request.multiple_of
    looked_at: list[Cell] = []
    may_look = request.options.mode == "train" and request.min_batch_size == 1 and request.multiple_of == 1
    may_look = may_look and not request.options.optimizer_in_backward

    def ask(cell: Cell) -> tuple[SimulatedProbe, ResultEntry | None]:
        simulation = simulations.get(cell.card.count, cells.simulation)
        # A probe of its own for each cell: it collects what this cell's result leaves out.
        device = cell.card.device.with_headroom(cell.headroom_bytes)
        probe = simulation.probe(device, cells.seq_lens, request.allocator)
        if request.cache is None:
            return probe, None
        return probe, request.cache.entry(cache_key(cell, facts, request), cells.model)

    # A recorder that records each size starts from the answers of one that scales.
    scaling = cells.simulation.on_fake_device() if cells.simulation.recorder == CUDA_BUILD else None

    def predict(cell: Cell) -> int | None:
        device = cell.card.device.with_headroom(cell.headroom_bytes)
        if scaling is not None:
            with suppress(BatchFinderError):  # the recorder that was asked for may do without
                probe = scaling.probe(device, cells.seq_lens, request.allocator)
                return search_simulated(probe, Shape(cell.seq_len), *limits, confirm=False).max_batch_size
        return None

    elsewhere: dict[tuple[Card, int | None], tuple[Future[list[SearchResult | None]], int]] | None = None

    def find(card: Card, seq_len: int | None) -> SweepRow:
        nonlocal elsewhere
        cell = cells.cell(seq_len, card)
        status(str(cell))
        start = time.perf_counter()
        probe, entry = ask(cell)
        known = entry.get() if entry is not None else None
        if known is None and card.count not in recorded:
            recorded.add(card.count)
            simulation = simulations.get(card.count, cells.simulation)
            for capability in capabilities:  # from old to new: newer kernels take no more blocks, and can share
                with suppress(BatchFinderError):  # raised again where it is needed
                    simulation.source(capability, cells.seq_lens).is_scaled(seq_len)
        result = known
        with suppress(BrokenExecutor):  # one of its processes was killed: all is found here then
            if known is None and cells.pool is not None and elsewhere is None:
                elsewhere = {}
                elsewhere = _search_elsewhere(cells.pool, cells, ask, limits)
            if known is None and elsewhere is not None and (card, seq_len) in elsewhere:
                future, place = elsewhere[card, seq_len]
                result = future.result()[place]
        if result is None:
            result = search_simulated(probe, Shape(seq_len), *limits, predicted=predict(cell))
        if result.max_batch_size == 0 and result.measurement is not None and cell.smallest > 1 and known is None:
            needed = probe.needed_bytes(cell.smallest, Shape(seq_len))
            result = replace(result, measurement=replace(result.measurement, needed_bytes=needed))
        not_cached = ""
        try:
            # Another process may have found it meanwhile, such as one of a cluster's whose driver has died.
            if entry is not None and known is None and entry.get() is None:
                entry.put(result)
        except CacheFailed as error:
            not_cached = str(error)
        trials = () if known else result.trials
        curve: tuple[tuple[int, int], ...] = ()
        if request.draw:  # from a small size to a little beyond the result, with unlimited memory
            most = max(2, math.ceil(_CURVE_END * result.max_batch_size))
            sizes = sorted({2 + (most - 2) * number // _CURVE_POINTS for number in range(_CURVE_POINTS + 1)})
            curve = tuple((size, probe.needed_bytes(size, result.shape)) for size in sizes)
        over_time, changes = None, None
        if request.page and result.max_batch_size:
            over_time = bytes_over_time(probe.trace(result.max_batch_size, result.shape))
        if request.page and len(request.place.cards) <= _CARDS_WITH_CHANGES:
            status(f"{cell}, with other options")
            changes = changes_of(cell, result, cells, changed)
        cost = None
        if request.mfu is not None and result.max_batch_size:
            cost = cost_of(cell, result, cells, simulations.get(card.count, cells.simulation), changed)
        what_fits = None
        if not result.max_batch_size and may_look and len(looked_at) < _CELLS_WITH_WHAT_FITS:
            looked_at.append(cell)
            simulation, target = simulations.get(card.count, cells.simulation), cell.target_batch_size or card.count
            usable = replace(card, device=card.device.with_headroom(cell.headroom_bytes))
            asked = replace(request.options, gpus=cell.options.gpus)
            shape = Shape(seq_len)
            search = FitSearch(cells.model, asked, usable, target, shape, simulation, status, exact=cell.exact)
            with suppress(BatchFinderError):  # the row stands without it
                what_fits = search.find(count=1)
        return SweepRow(
            cell,
            result,
            trials,
            seconds=time.perf_counter() - start,
            what_fits=what_fits,
            cached=known is not None,
            unscaled=sum((trial.batch_size, seq_len) in probe.traces.unscaled for trial in trials),
            curve=curve,
            over_time=over_time,
            changes=changes,
            not_cached=not_cached,
            cost=cost,
        )

    refused: dict[tuple[tuple[int, int], int], BatchFinderError] = {}
    for card in request.place.cards:
        kind = card.device.compute_capability, card.count
        for seq_len in cells.seq_lens:
            if kind in refused:
                break
            try:
                row = find(card, seq_len)
            except BatchFinderError as error:
                if type(error) not in _OF_A_KIND:
                    raise
                refused[kind] = error
            else:
                yield row
    for first in refused.values():
        raise first


def search_pool() -> ProcessPoolExecutor:
    """Processes that search the cells of many GPUs at once, one for each core."""
    return ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"), _start_in_pool)


def _start_in_pool() -> None:
    """In a process of the pool: Ctrl-C is the parent's to handle, and this one ends however that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(_OBJECTS_OF_REPLAYS)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _search_elsewhere(
    pool: Executor,
    cells: ModelCells,
    ask: Callable[[Cell], tuple[SimulatedProbe, ResultEntry | None]],
    limits: tuple[int | None, int, int],
) -> dict[tuple[Card, int | None], tuple[Future[list[SearchResult | None]], int]]:
    """Start the searches of a model's cells that are scaled and not in the cache: where each result will be.

    Cards that are searched in one process share what is replayed of one length.
    """
    found = {}
    shares = -(-2 * (os.cpu_count() or 1) // len(cells.seq_lens))
    for seq_len in cells.seq_lens:
        probes: dict[Card, SimulatedProbe] = {}
        for card in cells.request.place.cards:
            probe, entry = ask(cells.cell(seq_len, card))
            with suppress(BatchFinderError):  # raised again where it is needed
                if (entry is None or entry.get() is None) and probe.traces.is_scaled(seq_len):
                    probes[card] = probe
        largest: dict[tuple[tuple[int, int], int], Card] = {}
        for card in sorted(probes, key=lambda card: card.device.usable_bytes):
            largest[card.device.compute_capability, card.count] = card
        for card in largest.values():
            with suppress(BatchFinderError):  # raised again where it is needed
                check_scaling(probes[card], Shape(seq_len), limits[0], limits[2])
        cards = [card for card, probe in probes.items() if probe.traces.is_scaled(seq_len)]
        for share in range(shares):
            part = cards[share::shares]
            pickled = pickle.dumps([probes[card] for card in part])
            future = pool.submit(search_cards, pickled, Shape(seq_len), *limits)
            found.update({(card, seq_len): (future, place) for place, card in enumerate(part)})
    return found


def changes_of(
    cell: Cell, result: SearchResult, cells: ModelCells, recorded: dict[StepOptions, Simulation]
) -> tuple[Alternative, ...]:
    """What other options would change about a cell, one at a time, by scaled recordings alone.

    Args:
        recorded: the simulations of other options, which the cells of a model share.
    """
    request, device = cells.request, cell.card.device.with_headroom(cell.headroom_bytes)
    micro_batches, size = request.step.micro_batches, max(1, result.max_batch_size)
    base = replace(request.options, gpus=cell.options.gpus)
    asked = EstimateRequest(cells.model, size, cell.seq_len, cell.card, base, micro_batches, request.allocator)
    found = []
    for change in [{}, *single_changes(asked, cells.simulation.facts().brings_optimizer)]:
        options = replace(base, **change)
        if options not in recorded:
            spec = options.workload(cells.model)
            recorded[options] = cells.simulation.with_spec(spec, options.step(micro_batches))
        simulation = recorded[options] if options != request.options else cells.simulation
        probe = simulation.probe(device, cells.seq_lens, request.allocator)
        try:
            peak = probe.needed_bytes(size, result.shape)
            most = result.max_batch_size
            if change:
                limits = request.max_batch_size, request.min_batch_size, request.multiple_of
                most = search_simulated(probe, result.shape, *limits, confirm=False).max_batch_size
            found.append(Alternative(as_typed(change), size, peak, most >= size, most))
        except BatchFinderError as error:  # some models refuse an option, or fail with it
            found.append(Alternative(as_typed(change), size, error=words_of(error).strip().splitlines()[-1]))
    return tuple(found)


def cost_of(
    cell: Cell, result: SearchResult, cells: ModelCells, simulation: Simulation, recorded: dict[StepOptions, Simulation]
) -> TrainingCost | None:
    """What training costs at the request's share of the peak FLOP/s, by a recording of two samples; None if unpriced.

    Args:
        simulation: of the cell's step.
        recorded: the simulations of other options, which the cells of a model share.

    Raises:
        BatchFinderError: the step cannot be recorded.
    """
    request, card = cells.request, cell.card
    if request.mfu is None or card.price is None or card.price.usd_per_hour is None:
        return None
    options = replace(request.options, gpus=cell.options.gpus)
    peak = find_gpu(card.device.name.partition(",")[0]).peak_flops(options.precision)
    sample_flops = 0.0
    if peak is not None:
        # Of a loss in chunks not all are recorded, and Muon's products are not the samples'.
        optimizer = "adamw" if options.optimizer == "muon" else options.optimizer
        whole = replace(options, loss="default", optimizer=optimizer)
        if whole != options:
            if whole not in recorded:
                how = whole.step(request.step.micro_batches)
                recorded[whole] = cells.simulation.with_spec(whole.workload(cells.model), how)
            simulation = recorded[whole]
        size = max(cell.smallest, min(2, result.max_batch_size))  # some layers refuse a single sample
        probe = simulation.probe(card.device, cells.seq_lens, request.allocator)
        sample_flops = probe.trace(size, result.shape, exact=True).flops / size
    tokens = cell.seq_len if cells.simulation.facts().seq_len_unit == "tokens" else None
    return TrainingCost(request.mfu, card.price.usd_per_hour, card.count, peak, sample_flops, tokens)


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

    def _predicted(self, shape: Shape, max_peak_bytes: int) -> Prediction | None:
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
