"""The cells of one model in a sweep: what each is asked, the key it is cached under, and finding it by simulation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from batchfinder.cache import CacheKey
from batchfinder.cli.sweep_request import SweepRequest
from batchfinder.devices import Card
from batchfinder.recording.simulation import Simulation, search_simulated
from batchfinder.report.sweep import Cell, SweepRow
from batchfinder.reproductions.published import published_titan_x
from batchfinder.results import Shape
from batchfinder.training.spec import StepOptions, WorkloadFacts

_TITANS = ("Titan X Pascal", "GTX Titan X")
_CURVE_POINTS, _CURVE_END = 12, 1.15
"""Of a curve for the picture: how many steps, and how far it goes, as a multiple of the result."""


@dataclass(frozen=True)
class ModelCells:
    """The cells of one model, still to be found."""

    model: str
    simulation: Simulation
    seq_lens: tuple[int | None, ...]
    request: SweepRequest

    def cell(self, seq_len: int | None, card: Card) -> Cell:
        """One of the cells."""
        request, options = self.request, self.request.options
        # The published figures are for a whole Titan X of 12 GB, training in fp32 with Adam.
        like_published = card.name in _TITANS and replace(options, attention=None) == StepOptions()
        published = published_titan_x().get((self.model, seq_len or 0))
        if self.simulation.facts().brings_optimizer:
            options = replace(options, optimizer="its own")
        return Cell(
            model=self.model,
            seq_len=seq_len,
            card=card,
            options=options,
            headroom_bytes=request.reserve_bytes(card),
            target_batch_size=request.target_batch_size,
            min_batch_size=request.min_batch_size,
            multiple_of=request.multiple_of,
            published=published if like_published and options.attention != "flash" else None,
        )


def cache_key(cell: Cell, facts: WorkloadFacts, request: SweepRequest) -> CacheKey:
    """Everything that changes a simulated cell's result."""
    device, options = cell.card.device, cell.options
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
        gradient_checkpointing=options.gradient_checkpointing,
        accumulation=request.step.micro_batches,
        allocator=asdict(request.allocator),
        max_batch_size=request.max_batch_size,
        floor=request.min_batch_size,
        multiple_of=request.multiple_of,
        tolerance=0.0,
        headroom_bytes=cell.headroom_bytes,
        source="simulated",
        versions=facts.versions,
        extra={"capability": device.compute_capability},
    )


def simulate_cells(cells: ModelCells, status: Callable[[str], object], found: Callable[[SweepRow], object]) -> None:
    """Find every cell of a model.

    `status` is given lines on what is being done, `found` each row.

    Raises:
        BatchFinderError: the model could not be recorded.
    """
    request, facts = cells.request, cells.simulation.facts()
    for card in request.place.cards:
        for seq_len in cells.seq_lens:
            cell = cells.cell(seq_len, card)
            status(str(cell))
            start = time.perf_counter()
            # A probe of its own for each cell: it collects what this cell's result leaves out.
            device = card.device.with_headroom(cell.headroom_bytes)
            probe = cells.simulation.probe(device, cells.seq_lens, request.allocator)
            key = cache_key(cell, facts, request)
            entry = None if request.cache is None else request.cache.entry(key, cells.model)
            known = entry.get() if entry is not None else None
            limits = request.max_batch_size, request.min_batch_size, request.multiple_of
            result = known or search_simulated(probe, Shape(seq_len), *limits)
            if result.max_batch_size == 0 and result.measurement is not None and cell.smallest > 1 and known is None:
                needed = probe.needed_bytes(cell.smallest, Shape(seq_len))
                result = replace(result, measurement=replace(result.measurement, needed_bytes=needed))
            if entry is not None and known is None:
                entry.put(result)
            trials = () if known else result.trials
            curve: tuple[tuple[int, int], ...] = ()
            if request.draw:  # from a small size to a little beyond the result, with unlimited memory
                most = max(2, math.ceil(_CURVE_END * result.max_batch_size))
                sizes = sorted({2 + (most - 2) * number // _CURVE_POINTS for number in range(_CURVE_POINTS + 1)})
                curve = tuple((size, probe.needed_bytes(size, result.shape)) for size in sizes)
            found(
                SweepRow(
                    cell,
                    result,
                    trials,
                    seconds=time.perf_counter() - start,
                    cached=known is not None,
                    unscaled=sum((trial.batch_size, seq_len) in probe.traces.unscaled for trial in trials),
                    curve=curve,
                )
            )
