"""What a sweep found, in words and figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from batchfinder.outcome import Verdict
from batchfinder.report.rows import SweepRow
from batchfinder.report.sheet import Columns, Sheet
from batchfinder.units import format_bytes

_KINDS = {"train": "training", "forward": "forward", "inference": "inference"}


def sweep_sheet(rows: Sequence[SweepRow], conditions: Iterable[str] = ()) -> Sheet:
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
    return Sheet(title, (", ".join([*_step(rows), *conditions]), usable), _columns(rows), _notes(rows))


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
