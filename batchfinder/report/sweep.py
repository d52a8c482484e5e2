"""One line of a sweep, as values.

What a sweep found, in words and figures.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batchfinder.accumulation import AccumulationPlan
from batchfinder.report.table import Columns, Table
from batchfinder.results import Verdict
from batchfinder.units import format_bytes

SCHEMA = 1


@dataclass(frozen=True)
class SweepRow:
    """The largest batch of one (model, GPU, sequence length).

    Attributes:
        model: as it was asked for.
        seq_len: tokens per sample; None for data of one fixed shape.
        gpu: the device's name.
        budget_bytes: what the allocator may take of it, the headroom included.
        mode: `train`, `forward` or `inference`.
        precision: `fp32`, `bf16-mixed`, `16-mixed` or `bf16-true`.
        optimizer: its name.
        attention: `eager`, `sdpa`, `flash`, or `default` for the model's own.
        gradient_checkpointing: whether activations are recomputed.
        max_batch_size: 0 when not even one sample fits.
        peak_allocated_bytes: at that size; None when it is 0.
        peak_reserved_bytes: at that size; None when it is 0.
        source: `simulated`, `measured` or `cache`.
        found_by: `simulated` or `measured`, also where it came from the cache.
        trials: sizes probed for this row; none where it came from the cache.
        failed_trials: how many of these did not run.
        seconds: spent on this row, with the recordings that it was the first to need.
        unmodelled: what a simulated figure leaves out.
        unscaled: how many of the sizes probed were recorded themselves, not scaled; 0 for a row from the cache.
        headroom_bytes: what had to stay free of the budget.
        stop: why the search ended: `exact` (the next size failed), `tolerance` (one a little larger did) or `cap` (no
            larger one was tried).
        stopped_by: how the smallest size that failed above the answer did: `out_of_memory`, `thrashing`,
            `size_ceiling`, `host_out_of_memory`; None where none failed.
        needed_bytes: what one sample would take, when the answer is 0.
        message: the device's own words, when the answer is 0.
        published: the published figure, where there is one.
        target_batch_size: the effective batch that was asked for; None without one.
        plan: how to make it, where something fits.
        curve: (batch size, peak reserved bytes) for the picture; not part of the JSON.
    """

    model: str
    seq_len: int | None
    gpu: str
    budget_bytes: int
    mode: str
    precision: str
    optimizer: str
    attention: str
    gradient_checkpointing: bool
    max_batch_size: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    source: str
    trials: int
    seconds: float
    unmodelled: tuple[str, ...] = ()
    unscaled: int = 0
    found_by: str = "simulated"
    failed_trials: int = 0
    headroom_bytes: int = 0
    stop: str = "exact"
    stopped_by: str | None = None
    needed_bytes: int | None = None
    message: str = ""
    published: int | None = None
    target_batch_size: int | None = None
    plan: AccumulationPlan | None = None
    curve: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        row = {
            "model": self.model,
            "seq_len": self.seq_len,
            "gpu": self.gpu,
            "budget_bytes": self.budget_bytes,
            "mode": self.mode,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "attention": self.attention,
            "gradient_checkpointing": self.gradient_checkpointing,
            "max_batch_size": self.max_batch_size,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "source": self.source,
            "trials": self.trials,
            "seconds": round(self.seconds, 3),
            "unmodelled": list(self.unmodelled),
            "unscaled": self.unscaled,
            "stop": self.stop,
            "needed_bytes": self.needed_bytes,
            "headroom_bytes": self.headroom_bytes,
            "failed_trials": self.failed_trials,
            "stopped_by": self.stopped_by,
            "found_by": self.found_by,
            "message": self.message,
            "published": self.published,
        }
        if self.target_batch_size is not None:
            row["target_batch_size"] = self.target_batch_size
            for name in ("micro_batch_size", "accumulation", "num_devices", "effective_batch_size"):
                row[name] = getattr(self.plan, name, None)
        return row


_KINDS = {"train": "training", "forward": "forward", "inference": "inference"}


def sweep_sheet(rows: Sequence[SweepRow], conditions: Iterable[str] = ()) -> Table:
    """The rows as a sheet. What is the same in all of them stands above the table.

    Args:
        rows: in the order in which they are to be shown; at least one.
        conditions: what else the figures hold under, in words.
    """
    gpus = _usable(rows)
    what = f"Largest {_KINDS[rows[0].mode]} batch"
    if rows[0].found_by == "measured":
        title = f"{what}, measured on {rows[0].gpu}"
        usable = f"{gpus[rows[0].gpu]} usable"
    elif len(gpus) == 1:
        title = f"{what} on {rows[0].gpu}, simulated"
        usable = f"{gpus[rows[0].gpu]} usable"
    else:
        title = f"{what}, simulated"
        usable = f"usable: {', '.join(f'{size} of {gpu}' for gpu, size in gpus.items())}"
    return Table(title, (", ".join([*_step(rows), *conditions]), usable), _columns(rows), _notes(rows))


def comma_separated(rows: Sequence[SweepRow]) -> str:
    """All figures as CSV with a heading; lists are joined by semicolons."""
    values = [row.to_json() for row in rows]
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in values for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in values:
        writer.writerow({name: "; ".join(value) if isinstance(value, list) else value for name, value in row.items()})
    return text.getvalue()


def _usable(rows: Sequence[SweepRow]) -> dict[str, str]:
    return {row.gpu: format_bytes(row.budget_bytes) for row in rows}


def _step(rows: Sequence[SweepRow]) -> list[str]:
    row = rows[0]
    words = [row.precision]
    if row.mode == "train":
        words.append(" or ".join(dict.fromkeys(row.optimizer for row in rows)))
    if row.attention != "default":
        words.append(f"{row.attention} attention")
    if row.gradient_checkpointing:
        words.append("gradient checkpointing")
    return words


def _columns(rows: Sequence[SweepRow]) -> Columns:
    """Text by heading; columns with nothing to say are left out."""
    table: Columns = {"model": [row.model for row in rows]}
    if len(_usable(rows)) > 1:
        table["GPU"] = [row.gpu for row in rows]
    if any(row.seq_len is not None for row in rows):
        table["seq len"] = ["-" if row.seq_len is None else str(row.seq_len) for row in rows]
    table["max batch"] = [str(row.max_batch_size) for row in rows]
    if any(row.published is not None for row in rows):
        table["published"] = ["" if row.published is None else str(row.published) for row in rows]
    table["peak reserved"] = [_peak(row) for row in rows]
    if any(row.target_batch_size is not None for row in rows):
        table["micro-batch x accumulation"] = [_plan(row) for row in rows]
    table["source"] = [row.found_by for row in rows]
    return table


def _peak(row: SweepRow) -> str:
    if row.peak_reserved_bytes is not None:
        return format_bytes(row.peak_reserved_bytes)
    return "-" if row.needed_bytes is None else f"1 needs {format_bytes(row.needed_bytes)}"


def _plan(row: SweepRow) -> str:
    if row.plan is None:
        return "-"
    factors = [row.plan.micro_batch_size, row.plan.accumulation]
    factors += [row.plan.num_devices] if row.plan.num_devices > 1 else []
    return f"{' x '.join(map(str, factors))} = {row.plan.effective_batch_size}"


def _where(row: SweepRow) -> str:
    return row.model if row.seq_len is None else f"{row.model} at {row.seq_len}"


def _notes(rows: Sequence[SweepRow]) -> tuple[str, ...]:
    notes = []
    if any(row.published is not None for row in rows):
        notes.append("published: by google-research/bert for a 12 GB Titan X, TensorFlow 1.11 with Adam in fp32")
    if any(row.plan is not None and row.plan.num_devices > 1 for row in rows):
        notes.append("where a plan has three factors, the last is the number of GPUs")
    notes += [f"left out: {text}" for text in dict.fromkeys(text for row in rows for text in row.unmodelled)]
    if capped := sorted({row.max_batch_size for row in rows if row.stop == "cap"}):
        notes.append(f"no larger batch was tried than {' or '.join(map(str, capped))}: it is the search's cap")
    if near := sum(row.stop == "tolerance" for row in rows):
        notes.append(f"to within the tolerance rather than exact: {near} of {len(rows)} rows")
    notes += [
        f"what stopped {_where(row)} was no full memory: {Verdict[row.stopped_by.upper()].value}"
        for row in rows
        if row.stopped_by is not None and row.stopped_by != Verdict.OUT_OF_MEMORY.name.lower()
    ]
    notes += [
        f"what became of one sample of {_where(row)}: {' '.join(row.message.split())}"
        for row in rows
        if row.message and row.needed_bytes is None
    ]
    if unscaled := sum(row.unscaled for row in rows):
        notes.append(f"recorded at the size itself rather than scaled: {unscaled} of the sizes tried")
    if cached := sum(row.source == "cache" for row in rows):
        notes.append(f"from the cache: {cached} of {len(rows)} rows")
    return tuple(notes)
