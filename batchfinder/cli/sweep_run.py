"""Running a sweep: one recording process per model, one search per cell."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.cache import CacheKey
from batchfinder.cli.options import DEFAULT_IMAGE_SIDE, Card, allocator_notes, headroom_bytes
from batchfinder.cli.sweep_request import DEFAULT_SEQ_LENS, SweepRequest
from batchfinder.devices import Device, device_for, find_gpu
from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.outcome import Outcome, Shape
from batchfinder.published import titan_x
from batchfinder.report.progress import SweepProgress
from batchfinder.report.rows import SweepRow
from batchfinder.search import Capped, Search, Secant
from batchfinder.simulator.predict import predict_max_batch_size
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.tracing.job import WorkloadFacts
from batchfinder.tracing.simulation import HowToStep, Simulation


def run_sweep(request: SweepRequest, progress: SweepProgress) -> None:
    """Find every cell, in the order asked for, telling `progress` of each.

    The next model is built while this one is recorded; more would only fill the host's memory.

    Args:
        request: what to find.
        progress: is told of each row as it is found.

    Raises:
        BatchFinderError: a model could not be built or recorded.
    """
    usual: tuple[int | None, ...] = request.seq_lens or DEFAULT_SEQ_LENS
    lengths = dict.fromkeys((model for model, _ in request.models), usual)
    simulations: dict[str, Simulation] = {}
    with ExitStack() as stack:
        for index in range(len(request.models)):
            progress.expect(sum(map(len, lengths.values())) * len(request.cards))
            near = request.models[index : index + 2]
            new = [(model, spec) for model, spec in near if model not in simulations]
            if new:
                progress.doing(f"building {' and '.join(model for model, _ in new)}")
            for model, spec in new:
                simulations[model] = stack.enter_context(Simulation(spec, request.how))
            model = near[0][0]
            lengths[model] = _seq_lens(model, simulations[model].facts(), request)
            progress.expect(sum(map(len, lengths.values())) * len(request.cards))
            _sweep_model(model, simulations[model], lengths[model], request, progress)
            simulations[model].close()


def _sweep_model(
    model: str,
    simulation: Simulation,
    seq_lens: tuple[int | None, ...],
    request: SweepRequest,
    progress: SweepProgress,
) -> None:
    facts = simulation.facts()
    for card in request.cards:
        device = _less_headroom(card.device, request.headroom)
        for seq_len in seq_lens:
            # A probe of its own for each cell: it collects what this cell's answer leaves out.
            probe = simulation.probe(device, seq_lens, request.allocator)
            where = f"{model} on {card.name}" if seq_len is None else f"{model} at {seq_len} on {card.name}"
            progress.doing(where, worth_a_line=False)
            start = time.perf_counter()
            outcome = _find(probe, Shape(seq_len), cache_key(facts, card, device, seq_len, request), request)
            unscaled = sum((trial.batch_size, seq_len) in probe.traces.unscaled for trial in outcome.trials)
            seconds = time.perf_counter() - start
            progress.found(_row(model, facts, card, device, request, outcome, unscaled, seconds))


def _find(probe: SimulatedProbe, shape: Shape, key: CacheKey, request: SweepRequest) -> Outcome:
    slot = request.cache.slot(key) if request.cache is not None else None
    predicted = predict_max_batch_size(probe, shape) if slot is None or slot.get() is None else None
    search: Search[Any] = Secant(tolerance=0.0, predicted=predicted, margin=0.0)
    if request.max_batch_size is not None:
        search = Capped(search, request.max_batch_size)
    return find_max_batch_size(probe, shape, search=search, cache=slot)


def _seq_lens(model: str, facts: WorkloadFacts, request: SweepRequest) -> tuple[int | None, ...]:
    """The lengths for one model: those asked for, which it must allow, or the defaults that it allows.

    Raises:
        InvalidValue: a length asked for is beyond the model's positions.
    """
    most = facts.max_seq_len
    if request.seq_lens:
        for seq_len in request.seq_lens:
            if most is not None and seq_len > most:
                raise InvalidValue(
                    "--seq-len", seq_len, f"at most {most} {facts.seq_len_unit}, the most that {model} allows"
                )
        return request.seq_lens
    if facts.seq_len_unit == "pixels":
        return (DEFAULT_IMAGE_SIDE,)
    if facts.seq_len_unit == "none":
        return (None,)
    return tuple(seq_len for seq_len in DEFAULT_SEQ_LENS if most is None or seq_len <= most) or (most,)


def _less_headroom(device: Device, headroom: str) -> Device:
    return replace(device, usable_bytes=device.usable_bytes - headroom_bytes(headroom, device.usable_bytes))


def cache_key(facts: WorkloadFacts, card: Card, device: Device, seq_len: int | None, request: SweepRequest) -> CacheKey:
    """Everything that changes a cell's answer.

    Args:
        facts: of the model.
        card: what is simulated.
        device: the card's device, less the headroom.
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
        headroom_bytes=card.device.usable_bytes - device.usable_bytes,
        source="simulated",
        versions=facts.versions,
        extra={"capability": card.device.compute_capability},
    )


def _row(
    model: str,
    facts: WorkloadFacts,
    card: Card,
    device: Device,
    request: SweepRequest,
    outcome: Outcome,
    unscaled: int,
    seconds: float,
) -> SweepRow:
    measurement, size = outcome.measurement, outcome.max_batch_size
    seq_len = outcome.shape.seq_len
    plan: AccumulationPlan | None = None
    if request.target_batch_size is not None and size:
        plan = plan_accumulation(request.target_batch_size, size, card.count)
    return SweepRow(
        model=model,
        seq_len=seq_len,
        gpu=card.name,
        budget_bytes=device.usable_bytes,
        mode=request.how.mode,
        precision=request.how.precision,
        optimizer="its own" if facts.brings_optimizer else request.how.optimizer,
        attention=request.attention or "default",
        gradient_checkpointing=request.gradient_checkpointing,
        max_batch_size=size,
        peak_allocated_bytes=measurement.peak_allocated_bytes if measurement and size else None,
        peak_reserved_bytes=measurement.peak_reserved_bytes if measurement and size else None,
        stop=outcome.stop.name.lower(),
        source=outcome.source,
        trials=len(outcome.trials),
        seconds=seconds,
        unmodelled=outcome.unmodelled + allocator_notes(request.allocator),
        unscaled=unscaled,
        needed_bytes=measurement.needed_bytes if measurement and not size else None,
        published=_published(model, seq_len, card, request),
        target_batch_size=request.target_batch_size,
        plan=plan,
    )


def _published(model: str, seq_len: int | None, card: Card, request: SweepRequest) -> int | None:
    """The published figure of the same cell: a whole Titan X of 12 GB, training in fp32 with Adam."""
    same = request.how == HowToStep(micro_batches=request.how.micro_batches) and not request.gradient_checkpointing
    titans = {device_for(find_gpu(name)).name for name in ("titan x", "titan x maxwell")}
    return titan_x().get((model, seq_len or 0)) if same and card.name in titans else None
