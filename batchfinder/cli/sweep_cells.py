"""The cells of a sweep: what is asked of one, the key it is kept under, and its row.

A model's cells on simulated cards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.cache import CacheKey
from batchfinder.cli.options import Card, allocator_notes
from batchfinder.cli.sweep_request import SweepRequest
from batchfinder.devices import Device, device_for, find_gpu
from batchfinder.recording.simulation import Simulation, StepConfig, search_simulated
from batchfinder.report.sweep import SweepRow
from batchfinder.reproductions.published import published_titan_x
from batchfinder.results import SearchResult, Shape, Trial
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.training.spec import WorkloadFacts


@dataclass(frozen=True)
class ModelCells:
    """The cells of one model, still to be found.

    Attributes:
        model: as it was asked for.
        simulation: of the model.
        seq_lens: of the cells.
        request: the rest.
    """

    model: str
    simulation: Simulation
    seq_lens: tuple[int | None, ...]
    request: SweepRequest

    def name(self, seq_len: int | None, card: Card) -> str:
        """What a cell is called in messages.

        Args:
            seq_len: tokens per sample; None for data of one fixed shape.
            card: what it is for.
        """
        return f"{self.model} on {card.name}" if seq_len is None else f"{self.model} at {seq_len} on {card.name}"


@dataclass(frozen=True)
class Cell:
    """An answer and how it was come by.

    Attributes:
        model: as it was asked for.
        facts: of the model.
        card: what it was found for, with what was usable of it then.
        outcome: as it is kept: with its original source and all trials.
        trials: of this run; none where the answer came from the cache.
        seconds: spent on it in this run.
        cached: whether it came from the cache as it is.
        unscaled: how many of the sizes probed were recorded themselves.
        left_out: what the figures leave out, beyond what the outcome says.
        curve: (batch size, peak reserved bytes), where a picture was asked for.
    """

    model: str
    facts: WorkloadFacts
    card: Card
    outcome: SearchResult
    trials: tuple[Trial, ...]
    seconds: float
    cached: bool
    unscaled: int = 0
    left_out: tuple[str, ...] = ()
    curve: tuple[tuple[int, int], ...] = ()


def cache_key(facts: WorkloadFacts, card: Card, seq_len: int | None, request: SweepRequest) -> CacheKey:
    """Everything that changes a simulated cell's answer.

    Args:
        facts: of the model.
        card: what is simulated.
        seq_len: tokens per sample; None for data of one fixed shape.
        request: the rest.
    """
    return CacheKey(
        model=facts.fingerprint,
        gpu=card.device.name,
        total_bytes=card.device.total_bytes,
        usable_bytes=card.device.usable_bytes,
        seq_len=seq_len,
        mode=request.how.mode,
        precision=request.how.precision,
        optimizer="its own" if facts.brings_optimizer else request.how.optimizer,
        optimizer_options={},
        attention=request.attention or "",
        gradient_checkpointing=request.gradient_checkpointing,
        accumulation=request.how.micro_batches,
        allocator=asdict(request.allocator),
        max_batch_size=request.max_batch_size,
        floor=1,
        multiple_of=1,
        tolerance=0.0,
        headroom_bytes=request.reserve_bytes(card),
        source="simulated",
        versions=facts.versions,
        extra={"capability": card.device.compute_capability},
    )


def row_of(cell: Cell, request: SweepRequest) -> SweepRow:
    """A cell as values.

    Args:
        cell: an answer.
        request: what it was found under.
    """
    outcome, card = cell.outcome, cell.card
    measurement, size = outcome.measurement, outcome.max_batch_size
    plan: AccumulationPlan | None = None
    if request.target_batch_size is not None and size:
        plan = plan_accumulation(request.target_batch_size, size, card.count)
    return SweepRow(
        model=cell.model,
        seq_len=outcome.shape.seq_len,
        gpu=card.name,
        budget_bytes=card.device.usable_bytes,
        headroom_bytes=request.reserve_bytes(card),
        mode=request.how.mode,
        precision=request.how.precision,
        optimizer="its own" if cell.facts.brings_optimizer else request.how.optimizer,
        attention=request.attention or "default",
        gradient_checkpointing=request.gradient_checkpointing,
        max_batch_size=size,
        peak_allocated_bytes=measurement.peak_allocated_bytes if measurement and size else None,
        peak_reserved_bytes=measurement.peak_reserved_bytes if measurement and size else None,
        stop=outcome.stop.name.lower(),
        stopped_by=_stopped_by(outcome),
        source="cache" if cell.cached else outcome.source,
        found_by=outcome.source,
        trials=len(cell.trials),
        failed_trials=sum(not trial.fits for trial in cell.trials),
        seconds=cell.seconds,
        unmodelled=outcome.unmodelled + cell.left_out,
        unscaled=cell.unscaled,
        needed_bytes=measurement.needed_bytes if measurement and not size else None,
        message=measurement.message if measurement and not size else "",
        published=_published(cell.model, outcome.shape.seq_len, card, request),
        target_batch_size=request.target_batch_size,
        plan=plan,
        curve=cell.curve or _curve(outcome),
    )


def _curve(outcome: SearchResult) -> tuple[tuple[int, int], ...]:
    """The peaks of the sizes that ran."""
    seen = {trial.batch_size: trial.measurement.peak_reserved_bytes for trial in outcome.trials if trial.fits}
    return tuple((size, peak) for size, peak in sorted(seen.items()) if peak is not None)


def _stopped_by(outcome: SearchResult) -> str | None:
    """How the smallest size above the answer that was tried failed."""
    failed = [trial for trial in outcome.trials if not trial.fits and trial.batch_size > outcome.max_batch_size]
    if not failed:
        return None
    return min(failed, key=lambda trial: trial.batch_size).measurement.verdict.name.lower()


def _published(model: str, seq_len: int | None, card: Card, request: SweepRequest) -> int | None:
    """The published figure of the same cell: a whole Titan X of 12 GB, training in fp32 with Adam."""
    same = request.how == StepConfig(micro_batches=request.how.micro_batches) and not request.gradient_checkpointing
    titans = {device_for(find_gpu(name)).name for name in ("titan x", "titan x maxwell")}
    return published_titan_x().get((model, seq_len or 0)) if same and card.name in titans else None


_POINTS, _BEYOND = 12, 1.15
"""Of a curve for the picture: how many steps, and how far beyond the answer, as a multiple of it."""


def simulate_cells(cells: ModelCells, doing: Callable[[str], object], found: Callable[[Cell], object]) -> None:
    """Find every cell of a model.

    Args:
        cells: what to find.
        doing: is told what is being done.
        found: is told of each cell.

    Raises:
        BatchFinderError: the model could not be recorded.
    """
    model, request = cells.model, cells.request
    facts = cells.simulation.facts()
    left_out = allocator_notes(request.allocator)
    for card in request.cards:
        device = less(card.device, request.reserve_bytes(card))
        for seq_len in cells.seq_lens:
            # A probe of its own for each cell: it collects what this cell's answer leaves out.
            probe = cells.simulation.probe(device, cells.seq_lens, request.allocator)
            doing(cells.name(seq_len, card))
            start = time.perf_counter()
            key = cache_key(facts, card, seq_len, request)
            slot = request.cache.slot(key, model) if request.cache is not None else None
            known = slot.get() if slot is not None else None
            outcome = known or search_simulated(probe, Shape(seq_len), request.max_batch_size)
            if slot is not None and known is None:
                slot.put(outcome)
            trials = () if known else outcome.trials
            unscaled = sum((trial.batch_size, seq_len) in probe.traces.unscaled for trial in trials)
            seconds = time.perf_counter() - start
            curve = _simulated_curve(probe, outcome) if request.drawn else ()
            found(Cell(model, facts, card, outcome, trials, seconds, known is not None, unscaled, left_out, curve))


def _simulated_curve(probe: SimulatedProbe, outcome: SearchResult) -> tuple[tuple[int, int], ...]:
    """Peaks from a small size to a little beyond the answer, as on a card without end."""
    most = max(2, math.ceil(_BEYOND * outcome.max_batch_size))
    sizes = sorted({2 + (most - 2) * number // _POINTS for number in range(_POINTS + 1)})
    return tuple((size, probe.needed_bytes(size, outcome.shape)) for size in sizes)


def less(device: Device, reserve_bytes: int) -> Device:
    """The device with less of it usable; at least one byte is.

    Args:
        device: any.
        reserve_bytes: what is to stay free.
    """
    return replace(device, usable_bytes=max(1, device.usable_bytes - reserve_bytes))
