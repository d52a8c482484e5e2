"""What the cache knows, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchfinder.cache import Record
from batchfinder.report.table import Columns, Table
from batchfinder.units import format_bytes

NAME_DIGITS = 12
"""Digits of a digest that stand in lists: enough for 16 million records."""


def list_sheet(records: Sequence[Record], url: str) -> Table:
    """One line for each record.

    Args:
        records: in the order in which they should stand.
        url: where they are kept.
    """
    columns: Columns = {
        "record": [record.key.digest[:NAME_DIGITS] for record in records],
        "model": [record.label or f"({record.key.model[:NAME_DIGITS]})" for record in records],
        "GPU": [record.key.gpu for record in records],
        "seq len": [_text(record.key.seq_len) for record in records],
        "precision": [record.key.precision for record in records],
        "mode": [record.key.mode for record in records],
        "max batch": [str(record.outcome.max_batch_size) for record in records],
        "source": [record.outcome.source for record in records],
        "found": [f"{record.created:%Y-%m-%d}" for record in records],
    }
    return Table(f"What is known at {url}", (), columns)


def record_sheets(record: Record) -> Iterator[Table]:
    """What one answer depends on, and the sizes that were tried for it.

    Args:
        record: as the cache has it.
    """
    key = {name: value for name, value in record.key.as_dict().items() if value not in ({}, "")}
    names = [name.removesuffix("_bytes").replace("_", " ") for name in key]
    values = [
        format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else _text(value)
        for name, value in key.items()
    ]
    outcome = record.outcome
    title = f"{record.label or record.key.model[:NAME_DIGITS]}: max batch {outcome.max_batch_size}"
    found = f"{outcome.source}, found {record.created:%Y-%m-%d %H:%M} ({outcome.stop.value})"
    notes = tuple(f"left out: {text}" for text in outcome.unmodelled)
    yield Table(title, (found, f"record {record.key.digest}"), {"depends on": names, "value": values}, notes)
    if outcome.trials:
        seen = [trial.measurement for trial in outcome.trials]
        yield Table(
            "Sizes tried",
            (),
            {
                "batch size": [str(trial.batch_size) for trial in outcome.trials],
                "verdict": [measurement.verdict.name.lower().replace("_", " ") for measurement in seen],
                "peak allocated": [_bytes(measurement.peak_allocated_bytes) for measurement in seen],
                "peak reserved": [_bytes(measurement.peak_reserved_bytes) for measurement in seen],
                "seconds": [f"{measurement.seconds:.3f}" for measurement in seen],
            },
        )


def _bytes(value: int | None) -> str:
    return "" if value is None else format_bytes(value)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    return "" if value is None else str(value)
