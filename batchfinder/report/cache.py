"""Cached results as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchfinder.cache import Record
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.units import format_bytes

NAME_DIGITS = 12
"""Digits of a digest that stand in lists: enough for 16 million records."""


def list_table(records: Sequence[Record], url: str) -> Table:
    """One line for each record of the cache at `url`."""
    columns: Columns = {
        "record": [record.key.digest[:NAME_DIGITS] for record in records],
        "model": [record.label or f"({record.key.model[:NAME_DIGITS]})" for record in records],
        "GPU": [record.key.gpu for record in records],
        "seq len": [_text(record.key.seq_len) for record in records],
        "precision": [record.key.precision for record in records],
        "mode": [record.key.mode for record in records],
        "max batch": [str(record.result.max_batch_size) for record in records],
        "source": [record.result.source for record in records],
        "found": [f"{record.created:%Y-%m-%d}" for record in records],
    }
    return Table(f"Cached results at {url}", (), columns)


def record_tables(record: Record) -> Iterator[Table]:
    """What one result depends on, and the sizes that were tried for it."""
    key = {name: value for name, value in record.key.as_dict().items() if value not in ({}, "")}
    names = [name.removesuffix("_bytes").replace("_", " ") for name in key]
    values = [
        format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else _text(value)
        for name, value in key.items()
    ]
    result = record.result
    title = f"{record.label or record.key.model[:NAME_DIGITS]}: max batch {result.max_batch_size}"
    found = f"{result.source}, found {record.created:%Y-%m-%d %H:%M} ({result.stop.value})"
    yield Table(
        title,
        (found, f"record {record.key.digest}"),
        {"depends on": names, "value": values},
        assumptions(result.unmodelled, explain=True),
    )
    if result.trials:
        seen = [trial.measurement for trial in result.trials]
        yield Table(
            "Sizes tried",
            (),
            {
                "batch size": [str(trial.batch_size) for trial in result.trials],
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
