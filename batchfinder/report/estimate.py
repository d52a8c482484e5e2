"""What an estimate found, in words and figures: all that its tables, its JSON and its picture are made of.

An estimate as tables: by kind, the largest tensors, by module, on several GPUs, and what changes would buy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchfinder.estimate.breakdown import ModuleBytes, lists_folded, module_tree
from batchfinder.estimate.estimate import NAMES, Estimate, Peak
from batchfinder.report.table import Columns, Table
from batchfinder.units import format_bytes

SCHEMA = 1


@dataclass(frozen=True)
class Changed:
    """What one change of the options would buy.

    Attributes:
        change: the options to add or change, as they are typed; empty for none.
        batch_size: what `peak_bytes` and `fits` are for: the batch asked for, or a micro-batch of it.
        peak_bytes: the process's whole memory at that size; None where the change cannot be made.
        fits: whether the card has it; None likewise.
        max_batch_size: the largest batch on this card; None likewise.
        error: why the change cannot be made; None where it can.
        effective_batch_size: samples per optimizer step, where the change is of these; None elsewhere.
    """

    change: str
    batch_size: int
    peak_bytes: int | None = None
    fits: bool | None = None
    max_batch_size: int | None = None
    error: str | None = None
    effective_batch_size: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "change": self.change,
            "batch_size": self.batch_size,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "max_batch_size": self.max_batch_size,
            "error": self.error,
            "effective_batch_size": self.effective_batch_size,
        }


@dataclass(frozen=True)
class EstimateFindings:
    """One size of one model on one card.

    Attributes:
        model: as it was asked for.
        gpu: the card's name, with how many of it.
        num_gpus: how many train side by side.
        mode: `train`, `forward` or `inference`.
        precision: its name.
        optimizer: its name, or `its own`.
        attention: its name, or `default` for the model's own.
        gradient_checkpointing: whether activations are recomputed.
        accumulation: micro-batches per optimizer step.
        estimate: on one GPU that trains alone.
        strategies: on each of several GPUs, by what they do together.
        advice: what changes would buy; None where none were tried.
        by_module: whether each module is shown in the tables.
        unmodelled: what the figures leave out.
    """

    model: str
    gpu: str
    num_gpus: int
    mode: str
    precision: str
    optimizer: str
    attention: str
    gradient_checkpointing: bool
    accumulation: int
    estimate: Estimate
    strategies: Mapping[str, Estimate] = field(default_factory=dict)
    advice: tuple[Changed, ...] | None = None
    by_module: bool = False
    unmodelled: tuple[str, ...] = ()

    @property
    def modules(self) -> ModuleBytes:
        """What is alive at the peak, by module."""
        return module_tree(self.estimate.trace, self.estimate.alive)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; the figures at the top are those of one GPU that trains alone."""
        found = self.estimate
        last = found.last_segment
        return {
            "schema": SCHEMA,
            "model": self.model,
            "batch_size": found.trace.batch_size,
            "seq_len": found.trace.seq_len,
            "gpu": self.gpu,
            "num_gpus": self.num_gpus,
            "mode": self.mode,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "attention": self.attention,
            "gradient_checkpointing": self.gradient_checkpointing,
            "accumulation": self.accumulation,
            **found.to_json(),
            "peak": None if found.peak is None else found.peak.to_json(),
            "last_segment": None if last is None else last.to_json(),
            "num_alloc_retries": found.num_alloc_retries,
            "oom": None if found.oom is None else found.oom.message,
            "largest": [tensor.to_json() for tensor in found.largest()],
            "modules": self.modules.to_json(),
            "strategies": [{"strategy": name, **one.to_json()} for name, one in self.strategies.items()],
            "advice": None if self.advice is None else [changed.to_json() for changed in self.advice],
            "unmodelled": list(self.unmodelled),
        }


# Of the bytes alive: a module with less is no line of its own.
_LEAST_SHARE = 0.001
_STATES = ("parameters", "gradients", "optimizer")
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_APPROXIMATED = (
    "approximated: shards are exact parts, and the largest layer is there all the time rather than when it is needed",
    "left out: NCCL's own memory",
)


def estimate_sheets(found: EstimateFindings) -> tuple[Table, ...]:
    """All tables that there is something to say in, the one by kind first.

    Args:
        found: what was found.
    """
    sheets = [_by_kind(found), _largest(found.estimate)]
    if found.by_module:
        sheets.append(_by_module(found))
    if found.strategies:
        sheets.append(_together(found))
    if found.advice is not None:
        sheets.append(_advice(found, found.advice))
    return tuple(sheets)


def _by_kind(found: EstimateFindings) -> Table:
    one = found.estimate
    kinds = {NAMES[kind]: size for kind, size in one.kinds.shown().items()}
    columns: Columns = {
        "kind": [*kinds, "all"],
        "bytes": [format_bytes(size) for size in (*kinds.values(), one.peak_bytes)],
        "share": [_share(size, one.peak_bytes) for size in (*kinds.values(), one.peak_bytes)],
    }
    trace = one.trace
    size = f"batch size {trace.batch_size}" + ("" if trace.seq_len is None else f", sequence length {trace.seq_len}")
    title = f"{found.model} at {size} on {found.gpu}, simulated"
    return Table(title, (", ".join(_step(found)), _verdict(one)), columns, tuple(_notes(found)))


def _step(found: EstimateFindings) -> Iterator[str]:
    yield found.precision
    yield found.optimizer if found.mode == "train" else found.mode
    if found.attention != "default":
        yield f"{found.attention} attention"
    if found.gradient_checkpointing:
        yield "gradient checkpointing"
    if found.accumulation > 1:
        yield f"{found.accumulation} micro-batches"


def _verdict(one: Estimate) -> str:
    taken, there = format_bytes(one.peak_bytes), format_bytes(one.capacity_bytes)
    if one.fits:
        return f"fits: takes {taken} of {there}, {format_bytes(one.capacity_bytes - one.peak_bytes)} to spare"
    short = one.required_bytes - one.capacity_bytes
    by = f": {format_bytes(short)} short" if short > 0 else ""
    return f"does not fit{by}; it would take {taken}, and there are {there}"


def _notes(found: EstimateFindings) -> Iterator[str]:
    one = found.estimate
    if not one.fits:
        yield "as it does not fit, all figures are those of a card without end"
    if one.peak is not None and one.last_segment is not None:
        yield f"at the peak: {_moment(one.peak)}; {format_bytes(one.allocated_bytes)} are in live blocks"
        yield (
            f"the most is reserved from {_stage(one.last_segment)} on, and kept; fragmentation is what no tensor holds "
            "of it at the peak"
        )
    saved = ": a full one makes the allocator give back its cache" if one.required_bytes < one.peak_bytes else ""
    yield f"the smallest card that would do has {format_bytes(one.required_bytes)}{saved}"
    if one.num_alloc_retries:
        yield f"the cache has to be given back to go on (times: {one.num_alloc_retries}), which takes time in training"
    if not one.kinds.context:
        yield "left out: the CUDA context, as no card was named"
    yield from (f"left out: {text}" for text in found.unmodelled)


def _moment(peak: Peak) -> str:
    where = peak.tensor.module or "no module"
    asked = format_bytes(peak.tensor.bytes)
    return f"{_stage(peak)}, {where}, where {_operator(peak.tensor.operator)} asks for {asked}"


def _stage(peak: Peak) -> str:
    moment = peak.moment
    micro_batch = f", micro-batch {moment.micro_batch}" if moment.micro_batch else ""
    return f"step {moment.step}{micro_batch}, {moment.stage}" if moment.step >= 0 else "moving the model"


def _largest(one: Estimate) -> Table:
    tensors = one.largest()
    columns: Columns = {
        "bytes": [format_bytes(tensor.bytes) for tensor in tensors],
        "shape": [_shape(tensor.shape) for tensor in tensors],
        "kind": [tensor.kind for tensor in tensors],
        "module": [tensor.module or "-" for tensor in tensors],
        "operator": [_operator(tensor.operator) for tensor in tensors],
    }
    return Table(f"The {len(tensors)} largest tensors at the peak", (), columns)


def _shape(shape: str) -> str:
    """`fp32[8, 128]` for `float32[8, 128]`."""
    dtype, bracket, sizes = shape.partition("[")
    return f"{_SHORT.get(dtype, dtype)}{bracket}{sizes}" or "-"


def _operator(name: str) -> str:
    """`addmm` for `aten.addmm.default`, for people."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "aten" else name


def _by_module(found: EstimateFindings) -> Table:
    root = lists_folded(found.modules)
    outside = ModuleBytes("in no module", own=root.own)
    least = _LEAST_SHARE * root.total
    rows = [("all", root), *(row for child in root.children for row in _tree(child, 0))]
    rows += [(outside.name, outside)] if outside.own else []
    shown = [row for row in rows if row[1].total >= least]
    left_out = len(rows) - len(shown)
    rows = shown
    kinds = [module.by_kind() for _, module in rows]
    columns: Columns = {
        "module": [name for name, _ in rows],
        "model states": [format_bytes(sum(held.get(kind, 0) for kind in _STATES)) for held in kinds],
        "activations": [format_bytes(held.get("activations", 0)) for held in kinds],
        "temporary": [format_bytes(held.get("temporary", 0)) for held in kinds],
        "all": [format_bytes(module.total) for _, module in rows],
    }
    notes = ["model states: parameters, gradients and optimizer state"]
    notes += [f"left out: modules with less than 0.1 % (lines: {left_out})"] if left_out else []
    return Table("By module, at the peak", (), columns, tuple(notes))


def _tree(module: ModuleBytes, depth: int) -> Iterator[tuple[str, ModuleBytes]]:
    """A module and those in it; one with nothing but one other in it shares its line."""
    names = [_numbered(module)]
    while not module.own and len(module.children) == 1:
        module = module.children[0]
        names.append(_numbered(module))
    yield "  " * depth + ".".join(names), module
    for child in module.children:
        yield from _tree(child, depth + 1)


def _numbered(module: ModuleBytes) -> str:
    return f"* ({module.count})" if module.name == "*" else module.name


def _together(found: EstimateFindings) -> Table:
    each = found.strategies
    kinds = [one.kinds for one in each.values()]
    columns: Columns = {
        "strategy": list(each),
        "each takes": [format_bytes(one.peak_bytes) for one in each.values()],
        "model states": [format_bytes(one.parameters + one.gradients + one.optimizer) for one in kinds],
        "communication": [format_bytes(one.communication) for one in kinds],
        "smallest card": [format_bytes(one.required_bytes) for one in each.values()],
        "fits": ["yes" if one.fits else "no" for one in each.values()],
    }
    title = f"On {found.num_gpus} GPUs, each with a batch of {found.estimate.trace.batch_size} of its own"
    notes = (
        "model states: parameters, gradients and optimizer state at the peak",
        "communication: DDP's buckets; for ZeRO and FSDP what is gathered from shards or on its way to them",
    )
    return Table(title, (), columns, (*notes, *_APPROXIMATED))


def _advice(found: EstimateFindings, advice: tuple[Changed, ...]) -> Table:
    columns: Columns = {
        "change": [changed.change or "none" for changed in advice],
        "takes": ["-" if changed.peak_bytes is None else format_bytes(changed.peak_bytes) for changed in advice],
        "fits": [_fits(changed) for changed in advice],
        "largest batch": ["-" if changed.max_batch_size is None else str(changed.max_batch_size) for changed in advice],
    }
    size = found.estimate.trace.batch_size
    notes = [f"takes: with a batch of {size}, or the --batch-size named, the CUDA context included"]
    notes += [
        f"{changed.change}: an effective batch of {changed.effective_batch_size}"
        for changed in advice
        if changed.effective_batch_size is not None
    ]
    notes += [f"{changed.change}: {changed.error}" for changed in advice if changed.error is not None]
    return Table("What a change would buy on one GPU", (), columns, tuple(notes))


def _fits(changed: Changed) -> str:
    return "-" if changed.fits is None else "yes" if changed.fits else "no"


def _share(size: int, whole: int) -> str:
    return f"{size / whole:.1%}" if whole else "-"
