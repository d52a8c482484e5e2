"""The cells of one model on simulated cards: by recordings, or by sizes that PyTorch's CUDA build tries on the stub."""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace

from batchfinder.devices import Card, find_gpu
from batchfinder.devices.training_cost import TrainingCost
from batchfinder.errors import BatchFinderError, CacheFailed, InvalidValue, RecordingFailed
from batchfinder.memory_use.breakdown import bytes_over_time
from batchfinder.recording.answers import TriedSizes, check_scaling, search_cards, search_simulated, search_tried
from batchfinder.recording.simulation import Simulation
from batchfinder.recording.what_fits import FitSearch, WhatFits
from batchfinder.report.estimate import Alternative, EstimateRequest
from batchfinder.report.sweep import Cell, SweepRow
from batchfinder.report.terminal import last_line_of
from batchfinder.results import SearchResult, Shape
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.sizing.alternatives import as_typed, single_changes
from batchfinder.sizing.cells import ModelCells, cache_key
from batchfinder.sizing.recorder import instead_of_cuda_build
from batchfinder.training.spec import FAKE_DEVICE, StepOptions, is_cuda_build

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


def simulate_cells(cells: ModelCells, status: Callable[[str], object]) -> Iterator[SweepRow]:
    """Find every cell of a model, and yield each row as it is found; `status` is given lines on what is being done.

    Raises:
        BatchFinderError: the model could not be recorded. Where that may be for a compute capability or a number of
            GPUs alone, the cells of others are found first.
    """
    found = SimulatedCells(cells, status)
    refused: dict[tuple[tuple[int, int], int], BatchFinderError] = {}
    for card in cells.request.place.cards:
        kind = card.device.compute_capability, card.count
        for seq_len in cells.seq_lens:
            if kind in refused:
                break
            try:
                try:
                    row = found.row(seq_len, card)
                except BatchFinderError as error:
                    chosen = cells.request.chooses_recorder and is_cuda_build(cells.simulation.recorder)
                    if not chosen or isinstance(error, InvalidValue):
                        raise
                    cells = cells.on_fake_device(instead_of_cuda_build(error))
                    found = SimulatedCells(cells, status)
                    row = found.row(seq_len, card)
            except BatchFinderError as error:
                if type(error) not in _OF_A_KIND:
                    raise
                refused[kind] = error
            else:
                yield row
    for first in refused.values():
        raise first


class SimulatedCells:
    """The cells of one model on simulated cards."""

    def __init__(self, cells: ModelCells, status: Callable[[str], object]) -> None:
        self._cells = cells
        self._status = status
        self._request = request = cells.request
        self._facts = cells.simulation.facts()
        self._limits = request.max_batch_size, request.min_batch_size, request.multiple_of
        self._tries = is_cuda_build(cells.simulation.recorder)
        # What is tried is predicted by the recordings of the fake device, which are scaled.
        self._scaled = cells.simulation.on_fake_device() if self._tries else cells.simulation
        counts = {card.count for card in request.place.cards}
        several = self._scaled.on_several(counts) if request.options.gpus > 1 else {}
        self._simulations = {count: several.get(count, self._scaled) for count in counts}
        self._exact = self._simulations
        if self._tries:
            spec, how = cells.simulation.spec, cells.simulation.how
            gpus = {count: count if request.options.gpus > 1 else 1 for count in counts}
            self._exact = {count: cells.simulation.with_spec(spec, replace(how, gpus=gpus[count])) for count in counts}
        self._changed: dict[StepOptions, Simulation] = {}
        self._recorded: set[int] = set()
        self._looked_at: list[Cell] = []
        self._tried: dict[Cell, tuple[TriedSizes, int | None]] = {}
        self._elsewhere: dict[Cell, tuple[Future[list[SearchResult | None]], int]] | None = None

    def row(self, seq_len: int | None, card: Card) -> SweepRow:
        """Find the largest batch size for a length on a card; the length is None for data of one fixed shape.

        Raises:
            BatchFinderError: the step could not be recorded.
        """
        request, cells, shape = self._request, self._cells, Shape(seq_len)
        cell = cells.cell(seq_len, card)
        self._status(str(cell))
        start = time.perf_counter()
        # A probe of its own for each cell: it collects what this cell's result leaves out.
        probe = self._simulations[card.count].probe(cell.device, cells.seq_lens, request.allocator)
        store = request.cache
        entry = None if store is None else store.entry(cache_key(cell, self._facts, request), cell.model)
        known = entry.get() if entry is not None else None
        result = known
        if result is None and self._tries:
            result = self._try(cell, probe)
        if result is None and card.count not in self._recorded:
            self._recorded.add(card.count)
            for capability in sorted({card.device.compute_capability for card in request.place.cards}):
                # From old to new: newer kernels take no more blocks, and can share.
                with suppress(BatchFinderError):  # raised again where it is needed
                    self._simulations[card.count].source(capability, cells.seq_lens).is_scaled(seq_len)
        if result is None and cells.pool is not None:
            result = self._found_elsewhere(cell, cells.pool)
        if result is None:
            result = search_simulated(probe, shape, *self._limits)
        # What is not tried is recorded by the recorder that was asked for.
        exact = probe
        if self._tries:
            exact = self._exact[card.count].probe(cell.device, cells.seq_lens, request.allocator)
        seen = result.measurement
        if known is None and not result.max_batch_size and seen is not None and seen.needed_bytes is None:
            needed = exact.needed_bytes(cell.smallest, shape)
            result = replace(result, measurement=replace(seen, needed_bytes=needed))
        if cells.instead:
            result = replace(result, unmodelled=(*result.unmodelled, cells.instead))
        not_cached = ""
        try:
            # Another process may have found it meanwhile, such as one of a cluster's whose driver has died.
            if entry is not None and known is None and entry.get() is None:
                entry.put(result)
        except CacheFailed as error:
            not_cached = str(error)
        trials = () if known else result.trials
        over_time, changes, largest = None, None, result.max_batch_size
        if request.page and largest:
            over_time = bytes_over_time(exact.trace(largest, shape))
        if request.page and len(request.place.cards) <= _CARDS_WITH_CHANGES:
            self._status(f"{cell}, with other options")
            changes = self._changes(cell, result)
        return SweepRow(
            cell,
            result,
            trials,
            seconds=time.perf_counter() - start,
            what_fits=None if largest else self._what_fits(cell),
            cached=known is not None,
            unscaled=sum((trial.batch_size, seq_len) in probe.traces.unscaled for trial in trials),
            curve=self._curve(result, probe) if request.draw else (),
            over_time=over_time,
            changes=changes,
            not_cached=not_cached,
            cost=None if request.mfu is None or not largest else self._cost(cell, largest, request.mfu),
            recorder_version=self._facts.versions["torch"],
        )

    def _not_cached(self, cards: Iterable[Card]) -> Iterator[tuple[Cell, SimulatedProbe]]:
        """The cells whose answers are still to be found, card after card, and what predicts them."""
        request, cells, store = self._request, self._cells, self._request.cache
        for card, seq_len in itertools.product(cards, cells.seq_lens):
            cell = cells.cell(seq_len, card)
            entry = None if store is None else store.entry(cache_key(cell, self._facts, request), cell.model)
            if entry is None or entry.get() is None:
                yield cell, self._simulations[card.count].probe(cell.device, cells.seq_lens, request.allocator)

    def _try(self, cell: Cell, probe: SimulatedProbe) -> SearchResult:
        """Find the largest size that runs by trying it and the next; the tries of all lengths start at once."""
        if self._request.options.compile is not None:
            return self._try_compiled(cell)
        if cell not in self._tried:
            of_the_card = self._not_cached([cell.card])
            self._tried |= {other: self._begin_tries(other, predicting) for other, predicting in of_the_card}
        sizes, predicted = self._tried.get(cell) or self._begin_tries(cell, probe)
        return search_tried(sizes, Shape(cell.seq_len), *self._limits, predicted=predicted)

    def _try_compiled(self, cell: Cell) -> SearchResult:
        """The same of a compiled step. What the eager one would take is the prediction: each size compiles for long."""
        shape, options = Shape(cell.seq_len), replace(self._request.options, gpus=cell.options.gpus)
        eager = self._with(replace(options, recorder=FAKE_DEVICE, compile=None))
        probe = eager.probe(cell.device, self._cells.seq_lens, self._request.allocator)
        predicted, line = None, None
        with suppress(BatchFinderError):  # the sizes can be tried without it
            predicted = max(2, search_simulated(probe, shape, *self._limits, confirm=False).max_batch_size)
            rise = probe.needed_bytes(predicted, shape) - probe.needed_bytes(predicted // 2, shape)
            line = cell.device.usable_bytes, max(1.0, rise / (predicted - predicted // 2))
        sizes = self._exact[cell.card.count].tried_sizes(cell.device, self._request.allocator)
        return search_tried(sizes, shape, *self._limits, predicted=predicted, line=line)

    def _begin_tries(self, cell: Cell, probe: SimulatedProbe) -> tuple[TriedSizes, int | None]:
        """Predict a cell's largest size, and start trying that size and the next.

        Returns:
            The probe that tries sizes, and the predicted size; None where none could be predicted.
        """
        sizes, predicted = self._exact[cell.card.count].tried_sizes(cell.device, self._request.allocator), None
        shape, (most, _, step) = Shape(cell.seq_len), self._limits
        with suppress(BatchFinderError):  # the sizes can be tried without it
            predicted = search_simulated(probe, shape, *self._limits, confirm=False).max_batch_size or cell.smallest
            for size in (predicted, predicted + step):
                if most is None or size <= most:
                    sizes.ask(size, shape)
        return sizes, predicted

    def _found_elsewhere(self, cell: Cell, pool: Executor) -> SearchResult | None:
        """What a process of the pool found; None where it could not, or one of them was killed."""
        with suppress(BrokenExecutor):
            if self._elsewhere is None:
                self._elsewhere = {}
                self._elsewhere = self._search_elsewhere(pool)
            if cell in self._elsewhere:
                future, place = self._elsewhere[cell]
                return future.result()[place]
        return None

    def _search_elsewhere(self, pool: Executor) -> dict[Cell, tuple[Future[list[SearchResult | None]], int]]:
        """Start the searches of the cells that are scaled and not in the cache: where each result will be.

        Cards that are searched in one process share what is replayed of one length.
        """
        found: dict[Cell, tuple[Future[list[SearchResult | None]], int]] = {}
        shares = -(-2 * (os.cpu_count() or 1) // len(self._cells.seq_lens))
        by_length: dict[int | None, dict[Cell, SimulatedProbe]] = {}
        for cell, probe in self._not_cached(self._request.place.cards):
            with suppress(BatchFinderError):  # raised again where it is needed
                if probe.traces.is_scaled(cell.seq_len):
                    by_length.setdefault(cell.seq_len, {})[cell] = probe
        for seq_len, probes in by_length.items():
            largest: dict[tuple[tuple[int, int], int], Cell] = {}
            for cell in sorted(probes, key=lambda cell: cell.card.device.usable_bytes):
                largest[cell.card.device.compute_capability, cell.card.count] = cell
            for cell in largest.values():
                with suppress(BatchFinderError):  # raised again where it is needed
                    check_scaling(probes[cell], Shape(seq_len), self._limits[0], self._limits[2])
            scaled = [cell for cell, probe in probes.items() if probe.traces.is_scaled(seq_len)]
            for share in range(shares):
                part = scaled[share::shares]
                pickled = pickle.dumps([probes[cell] for cell in part])
                future = pool.submit(search_cards, pickled, Shape(seq_len), *self._limits)
                found.update({cell: (future, place) for place, cell in enumerate(part)})
        return found

    def _curve(self, result: SearchResult, probe: SimulatedProbe) -> tuple[tuple[int, int], ...]:
        """From a small size to a little beyond the result, with unlimited memory."""
        most = max(2, math.ceil(_CURVE_END * result.max_batch_size))
        sizes = sorted({2 + (most - 2) * number // _CURVE_POINTS for number in range(_CURVE_POINTS + 1)})
        return tuple((size, probe.needed_bytes(size, result.shape)) for size in sizes)

    def _what_fits(self, cell: Cell) -> WhatFits | None:
        """The mildest change of options under which a cell trains in which not one sample does; None where none is
        looked for or found.
        """
        request = self._request
        may_look = request.options.mode == "train" and request.min_batch_size == 1 and request.multiple_of == 1
        may_look = may_look and not request.options.optimizer_in_backward
        if not may_look or len(self._looked_at) >= _CELLS_WITH_WHAT_FITS:
            return None
        self._looked_at.append(cell)
        usable = replace(cell.card, device=cell.device)
        asked = replace(request.options, gpus=cell.options.gpus, recorder=FAKE_DEVICE)
        target, simulation = cell.target_batch_size or cell.card.count, self._simulations[cell.card.count]
        search = FitSearch(
            self._cells.model, asked, usable, target, Shape(cell.seq_len), simulation, self._status,
            exact=cell.exact, tries=self._exact[cell.card.count] if self._tries else None,
        )  # fmt: skip
        try:
            return search.find(count=1)
        except BatchFinderError:  # the row stands without it
            return None

    def _changes(self, cell: Cell, result: SearchResult) -> tuple[Alternative, ...]:
        """What other options would change about a cell, one at a time, by scaled recordings alone."""
        request, micro_batches = self._request, self._request.step.micro_batches
        size = max(1, result.max_batch_size)
        base = replace(request.options, gpus=cell.options.gpus, recorder=FAKE_DEVICE)
        asked = EstimateRequest(cell.model, size, cell.seq_len, cell.card, base, micro_batches, request.allocator)
        found = []
        for change in [{}, *single_changes(asked, self._facts.brings_optimizer)]:
            simulation = self._with(replace(base, **change)) if change else self._simulations[cell.card.count]
            probe = simulation.probe(cell.device, self._cells.seq_lens, request.allocator)
            try:
                peak = probe.needed_bytes(size, result.shape)
                most = result.max_batch_size
                if change:
                    most = search_simulated(probe, result.shape, *self._limits, confirm=False).max_batch_size
                found.append(Alternative(as_typed(change), size, peak, most >= size, most))
            except BatchFinderError as error:  # some models refuse an option, or fail with it
                found.append(Alternative(as_typed(change), size, error=last_line_of(error)))
        return tuple(found)

    def _cost(self, cell: Cell, largest: int, mfu: float) -> TrainingCost | None:
        """What training costs at a share of the peak FLOP/s, by a recording of two samples; None if unpriced."""
        request, card = self._request, cell.card
        if card.price is None or card.price.usd_per_hour is None:
            return None
        options = replace(request.options, gpus=cell.options.gpus, recorder=FAKE_DEVICE)
        peak = find_gpu(card.device.name.partition(",")[0]).peak_flops(options.precision)
        sample_flops = 0.0
        if peak is not None:
            # Of a loss in chunks not all are recorded, and Muon's products are not the samples'.
            optimizer = "adamw" if options.optimizer == "muon" else options.optimizer
            whole = replace(options, loss="default", optimizer=optimizer)
            simulation = self._simulations[card.count] if whole == options else self._with(whole)
            size = max(cell.smallest, min(2, largest))  # some layers refuse a single sample
            probe = simulation.probe(card.device, self._cells.seq_lens, request.allocator)
            sample_flops = probe.trace(size, Shape(cell.seq_len), exact=True).flops / size
        tokens = cell.seq_len if self._facts.seq_len_unit == "tokens" else None
        return TrainingCost(mfu, card.price.usd_per_hour, card.count, peak, sample_flops, tokens)

    def _with(self, options: StepOptions) -> Simulation:
        """The simulation with other options, which all cells share."""
        if options not in self._changed:
            how = options.step(self._request.step.micro_batches)
            self._changed[options] = self._scaled.with_spec(options.workload(self._cells.model), how)
        return self._changed[options]


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
