"""An estimate as one record, and the tables and JSON that are made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from batchfinder.devices import Card, Gpu, smallest_gpus, without_bf16
from batchfinder.memory_use.breakdown import NAMES, Estimate, ModuleBytes, Peak, fold_lists, module_tree
from batchfinder.recording.what_fits import WhatFits
from batchfinder.report.made_by import made_by
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.report.what_fits import what_fits_table
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.training.spec import StepOptions, recorder_in_words
from batchfinder.units import format_bytes

SCHEMA = 1


@dataclass(frozen=True)
class EstimateRequest:
    """What is estimated.

    Attributes:
        batch_size: samples in a GPU's micro-batch.
        seq_len: as it was asked for; None for the model's default.
        card: what is simulated, and how many of it.
        options: of the step; in findings, the optimizer is `OWN_OPTIMIZER` where the workload brings one.
        accumulation: micro-batches per optimizer step.
        chooses_recorder: whether the fake device takes over where the recorder of the options cannot take the step.
    """

    model: str
    batch_size: int
    seq_len: int | None
    card: Card
    options: StepOptions
    accumulation: int
    allocator: AllocatorSettings
    chooses_recorder: bool = False


@dataclass(frozen=True)
class Alternative:
    """What other options would change.

    Attributes:
        change: the options to add or change, as they are typed; empty for none.
        batch_size: what `peak_bytes` and `fits` are for: the batch asked for, or a micro-batch of it.
        peak_bytes: the process's whole memory at that size; None where the options cannot be combined.
        max_batch_size: the largest batch on this GPU; None likewise.
        error: why the options cannot be combined; None where they can.
        effective_batch_size: samples per optimizer step, where accumulation changes; None elsewhere.
    """

    change: str
    batch_size: int
    peak_bytes: int | None = None
    fits: bool | None = None
    max_batch_size: int | None = None
    error: str | None = None
    effective_batch_size: int | None = None


@dataclass(frozen=True)
class EstimateFindings:
    """What the memory of one size of one model is used for on one GPU.

    Printed it is the tables of `batchfinder estimate`, and so it is in a notebook.

    Attributes:
        request: what was asked for: the model, the card and the options of the step.
        estimate: of one GPU that trains alone.
        strategies: of each of several GPUs, by how they train together.
        alternatives: what other options would change; None where none were tried.
        unmodelled: what the figures leave out.
        what_fits: options under which the same trains; None where it fits, or nothing trains.
        recorder_version: of the PyTorch that recorded it.
    """

    request: EstimateRequest
    estimate: Estimate
    strategies: Mapping[str, Estimate] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] | None = None
    unmodelled: tuple[str, ...] = ()
    what_fits: WhatFits | None = None
    recorder_version: str = ""

    @property
    def model(self) -> str:
        """As it was asked for."""
        return self.request.model

    @property
    def gpu(self) -> str:
        """Its name; of an instance with the instance's."""
        return self.request.card.name

    @property
    def batch_size(self) -> int:
        """Samples in a GPU's micro-batch."""
        return self.estimate.trace.batch_size

    @property
    def seq_len(self) -> int | None:
        """Tokens per sample, or pixels of an image's side; None for data of one fixed shape."""
        return self.estimate.trace.seq_len

    @property
    def fits(self) -> bool:
        """Whether the GPU has room for it, step after step."""
        return self.estimate.fits

    @property
    def peak_bytes(self) -> int:
        """All that the process takes of the GPU, the CUDA context included; where it does not fit, what it would."""
        return self.estimate.peak_bytes

    @property
    def capacity_bytes(self) -> int:
        """What the GPU has for the process, the CUDA context included."""
        return self.estimate.capacity_bytes

    @property
    def required_bytes(self) -> int:
        """The least that a GPU must have for this size to run, the CUDA context included."""
        return self.estimate.required_bytes

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Parameters, gradients, optimizer, activations and so on, as `Kinds` has them; they sum to `peak_bytes`."""
        return self.estimate.kinds.shown()

    def __repr__(self) -> str:
        return "\n\n".join(map(str, estimate_tables(self)))

    def _repr_html_(self) -> str:
        return "".join(table.to_html() for table in estimate_tables(self))

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; the figures at the top are those of one GPU that trains alone."""
        found, asked = self.estimate, self.request
        last = found.last_segment
        return {
            "schema": SCHEMA,
            "made_by": made_by(),
            "model": asked.model,
            "batch_size": found.trace.batch_size,
            "seq_len": found.trace.seq_len,
            "gpu": asked.card.name,
            "num_gpus": asked.card.count,
            **asked.options.to_json(),
            "recorder": asked.options.recorder,
            "recorder_version": self.recorder_version,
            "accumulation": asked.accumulation,
            **found.to_json(),
            "peak": None if found.peak is None else found.peak.to_json(),
            "smallest_gpus": [gpu.name for gpu in enough_for(self)],
            "last_segment": None if last is None else last.to_json(),
            "num_alloc_retries": found.num_alloc_retries,
            "oom": None if found.oom is None else found.oom.message,
            "largest": [tensor.to_json() for tensor in found.largest()],
            "modules": module_tree(found.trace, found.alive).to_json(),
            "strategies": [{"strategy": name, **one.to_json()} for name, one in self.strategies.items()],
            "advice": None if self.alternatives is None else [asdict(one) for one in self.alternatives],
            "what_fits": None if self.what_fits is None else self.what_fits.to_json(),
            "unmodelled": list(self.unmodelled),
        }


_LEAST_SHARE = 0.001
"""Of the bytes alive: a module with less has no line of its own."""
_STATES = ("parameters", "gradients", "optimizer")
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_SHARDING_ASSUMPTIONS = ("NCCL's own memory is what one communicator was measured to take",)


def enough_for(found: EstimateFindings) -> list[Gpu]:
    """The smallest GPUs that have enough for it; with a bf16 precision, of those with units for bf16."""
    needed = found.estimate.required_bytes - found.request.card.device.context_bytes
    options = found.request.options
    bf16 = options.precision.startswith("bf16")
    return smallest_gpus(needed, bf16=bf16, communicators=options.communicators)


def estimate_tables(found: EstimateFindings, by_module: bool = False, explain: bool = False) -> tuple[Table, ...]:
    """All tables that have rows, the one by kind first.

    Args:
        by_module: whether each module's memory is shown.
        explain: whether what the figures assume is listed rather than counted.
    """
    tensors = found.estimate.largest()
    largest: Columns = {
        "bytes": [format_bytes(tensor.bytes) for tensor in tensors],
        "shape": [],
        "kind": [tensor.kind for tensor in tensors],
        "module": [tensor.module or "-" for tensor in tensors],
        "operator": [_operator(tensor.operator) for tensor in tensors],
    }
    for tensor in tensors:  # `fp32[8, 128]` for `float32[8, 128]`
        dtype, bracket, sizes = tensor.shape.partition("[")
        largest["shape"].append(f"{_SHORT.get(dtype, dtype)}{bracket}{sizes}" or "-")
    tables = [_by_kind(found, explain), Table(f"The {len(tensors)} largest tensors at the peak", (), largest)]
    if by_module:
        tables.append(_by_module(found.estimate))
    if found.strategies:
        each, kinds = found.strategies, [one.kinds for one in found.strategies.values()]
        sharded: Columns = {
            "strategy": list(each),
            "each takes": [format_bytes(one.peak_bytes) for one in each.values()],
            "model states": [format_bytes(one.parameters + one.gradients + one.optimizer) for one in kinds],
            "communication": [format_bytes(one.communication) for one in kinds],
            "smallest GPU": [format_bytes(one.required_bytes) for one in each.values()],
            "fits": ["yes" if one.fits else "no" for one in each.values()],
        }
        several = (
            f"On {found.request.card.count} GPUs, each with a batch of {found.estimate.trace.batch_size} of its own"
        )
        left_out = (
            "model states: parameters, gradients and optimizer state at the peak",
            "communication: DDP's buckets and ZeRO-2's; for FSDP what is gathered from shards or on its way to them",
            *assumptions(_SHARDING_ASSUMPTIONS, explain),
        )
        tables.append(Table(several, (), sharded, left_out))
    if found.alternatives is not None:
        tried, size = found.alternatives, found.estimate.trace.batch_size
        columns: Columns = {
            "change": [one.change or "none" for one in tried],
            "takes": ["-" if one.peak_bytes is None else format_bytes(one.peak_bytes) for one in tried],
            "fits": ["-" if one.fits is None else "yes" if one.fits else "no" for one in tried],
            "largest batch": ["-" if one.max_batch_size is None else str(one.max_batch_size) for one in tried],
        }
        notes = [f"takes: with a batch of {size}, or the --batch-size named, the CUDA context included"]
        effective = [one for one in tried if one.effective_batch_size is not None]
        notes += [f"{one.change}: an effective batch of {one.effective_batch_size}" for one in effective]
        notes += [f"{one.change}: {one.error}" for one in tried if one.error is not None]
        gpus = found.request.options.gpus
        title = f"Other options on {'one GPU' if gpus == 1 else f'{gpus} GPUs'}"
        tables.append(Table(title, (), columns, tuple(notes)))
    if found.what_fits is not None:
        samples = found.estimate.trace.batch_size * found.request.accumulation * found.request.card.count
        title = f"What trains {samples} sample{'' if samples == 1 else 's'} at a time on {found.request.card.name}"
        tables.append(what_fits_table(found.what_fits, found.request.card, title, explain))
    return tuple(tables)


def _by_kind(found: EstimateFindings, explain: bool) -> Table:
    one, asked, trace = found.estimate, found.request, found.estimate.trace
    kinds = {NAMES[kind]: size for kind, size in one.kinds.shown().items()}
    sizes = (*kinds.values(), one.peak_bytes)
    columns: Columns = {
        "kind": [*kinds, "all"],
        "bytes": [format_bytes(size) for size in sizes],
        "share": [f"{size / one.peak_bytes:.1%}" if one.peak_bytes else "-" for size in sizes],
    }
    at = f"batch size {trace.batch_size}" + ("" if trace.seq_len is None else f", sequence length {trace.seq_len}")
    step = asked.options.words() + ([f"{asked.accumulation} micro-batches"] if asked.accumulation > 1 else [])
    taken = format_bytes(one.peak_bytes)
    there = format_bytes(one.capacity_bytes) + (" with the CUDA context" if one.kinds.context else "")
    if one.fits:
        verdict = f"fits: takes {taken} of {there}, {format_bytes(one.capacity_bytes - one.peak_bytes)} free"
    else:
        short = one.required_bytes - one.capacity_bytes
        by = f": {format_bytes(short)} short" if short > 0 else ""
        verdict = f"does not fit{by}; it would take {taken} of {there}"
    notes = [] if one.fits else ["it does not fit, so all figures are for a GPU with unlimited memory"]
    if one.peak is not None and one.last_segment is not None:
        where, operator = one.peak.tensor.module or "no module", _operator(one.peak.tensor.operator)
        peak = f"{_stage(one.peak)}, {where}, where {operator} allocates {format_bytes(one.peak.tensor.bytes)}"
        notes.append(f"peak: {peak}; {format_bytes(one.allocated_bytes)} allocated")
        since = _stage(one.last_segment)
        notes.append(f"reserved memory is highest from {since} on; fragmentation: reserved, in no tensor at the peak")
    saved = ", where PyTorch has to free cached memory for it" if one.required_bytes < one.peak_bytes else ""
    smallest = ", ".join(gpu.name for gpu in enough_for(found)) or "none of the catalogue"
    notes.append(f"the smallest GPU that runs it has {format_bytes(one.required_bytes)}{saved}")
    notes.append(f"GPUs with as much memory: {smallest}")
    if one.num_alloc_retries:
        notes.append(f"allocation retries: {one.num_alloc_retries}; each frees the allocator's cache, which takes time")
    notes += without_bf16(asked.options.precision, [asked.card.device])
    context = () if one.kinds.context else ("the CUDA context, as no GPU was named",)
    notes += assumptions((*context, *found.unmodelled), explain)
    title = f"{asked.model} at {at} on {asked.card.name}, simulated"
    recorder = recorder_in_words(asked.options.recorder, found.recorder_version)
    return Table(title, (", ".join(step), verdict, f"recorder: {recorder}"), columns, tuple(notes))


def _stage(peak: Peak) -> str:
    moment = peak.moment
    micro_batch = f", micro-batch {moment.micro_batch}" if moment.micro_batch else ""
    return f"step {moment.step}{micro_batch}, {moment.stage}" if moment.step >= 0 else "moving the model"


def _operator(name: str) -> str:
    """`addmm` for `aten.addmm.default`, for people."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else name


def _by_module(one: Estimate) -> Table:
    root = fold_lists(module_tree(one.trace, one.alive))

    def lines(module: ModuleBytes, depth: int) -> Iterator[tuple[str, ModuleBytes]]:
        """A module and those in it; one with nothing but one other in it shares its line."""
        chain = [module]
        while not chain[-1].own and len(chain[-1].children) == 1:
            chain.append(chain[-1].children[0])
        names = (f"* ({each.count})" if each.name == "*" else each.name for each in chain)
        yield "  " * depth + ".".join(names), chain[-1]
        for child in chain[-1].children:
            yield from lines(child, depth + 1)

    rows = [("all", root), *(line for child in root.children for line in lines(child, 0))]
    if root.own:
        rows.append(("in no module", ModuleBytes("in no module", own=root.own)))
    shown = [row for row in rows if row[1].total >= _LEAST_SHARE * root.total]
    kinds = [module.by_kind() for _, module in shown]
    columns: Columns = {
        "module": [name for name, _ in shown],
        "model states": [format_bytes(sum(held.get(kind, 0) for kind in _STATES)) for held in kinds],
        "activations": [format_bytes(held.get("activations", 0)) for held in kinds],
        "temporary": [format_bytes(held.get("temporary", 0)) for held in kinds],
        "all": [format_bytes(module.total) for _, module in shown],
    }
    notes = ["model states: parameters, gradients and optimizer state"]
    if len(shown) < len(rows):
        notes.append(f"modules with less than 0.1 % are not shown: {len(rows) - len(shown)}")
    return Table("By module, at the peak", (), columns, tuple(notes))
