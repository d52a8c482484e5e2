"""`cache`: list, show, remove, export and import cached results, and how they are shown as tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from batchfinder.cache import DamagedRecord, Record, Store, read_export, write_export
from batchfinder.cache.record import encode
from batchfinder.cli.options import read_file, write_file
from batchfinder.errors import InvalidValue, UnknownName
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.report.terminal import printable, tell
from batchfinder.results import SearchResult
from batchfinder.units import format_bytes

_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def main(arguments: argparse.Namespace) -> int:
    """Run one of its commands."""
    store, command = Store(arguments.cache), arguments.cache_command
    if command == "list":
        records = sorted(store.records(), key=lambda record: (record.label, record.key.gpu, record.key.seq_len or 0))
        if arguments.json:
            found = {"url": store.url, "records": [json.loads(encode(record)) for record in records]}
            print(json.dumps(found, indent=1))
        elif records:
            list_table(records, store.url).show()
        else:
            print(f"the cache at {printable(store.url)} is empty")
    elif command == "show":
        record = _one(store, arguments.record)
        if arguments.json:
            print(json.dumps(json.loads(encode(record)), indent=1))
        else:
            for number, table in enumerate(record_tables(record)):
                print(end="\n" if number else "")
                table.show()
    elif command == "clear":
        if arguments.record:
            chosen = {record.key.digest: record for record in (_one(store, digits) for digits in arguments.record)}
            gone = sum(store.remove(record.key) for record in chosen.values())
        else:
            if not arguments.yes and sys.stdin is not None and sys.stdin.isatty():
                count = len(list(store.records()))
                tell(f"batchfinder: remove all {count} records of {printable(store.url)}, measured ones too? [y/N]")
                if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                    tell("batchfinder: nothing was removed")
                    return 1
            gone = store.clear()
        print(f"{gone} record{'s' * (gone != 1)} removed from {store.url}")
    elif command == "export":
        records = list(store.records())
        text = write_export(records)
        if arguments.file == "-":
            print(text, end="")
        else:
            write_file("FILE", arguments.file, text)
            print(f"{len(records)} record{'s' * (len(records) != 1)} of {store.url} written to {arguments.file}")
    else:
        _import(store, arguments.file)
    return 0


def _import(store: Store, file: str) -> None:
    store.check_writable()
    try:
        # All are read before the first is kept: a damaged file changes nothing.
        records = list(read_export(read_file("FILE", file)))
    except DamagedRecord as damage:
        raise InvalidValue("FILE", file, f"a file written by `cache export`; {damage.reason}") from damage
    here = {record.key.digest: record.created for record in store.records()}
    newer = [record for record in records if record.created > here.get(record.key.digest, _LONG_AGO)]
    for record in newer:
        store.put_record(record)
    left = len(records) - len(newer)
    kept = f"; {left} skipped, as the cache has the same or a newer one" if left else ""
    print(f"{len(newer)} record{'s' * (len(newer) != 1)} imported into {store.url}{kept}")


def _one(store: Store, digits: str) -> Record:
    """The record whose digest begins with these digits.

    Raises:
        UnknownName: no record's does.
        InvalidValue: several records' do.
    """
    found = list(store.records(digits))
    if not found:
        raise UnknownName("cache record", digits, (), "`batchfinder cache list` lists all records.")
    if len(found) > 1:
        raise InvalidValue("RECORD", digits, f"more digits: {len(found)} records begin with these")
    return found[0]


NAME_DIGITS = 12
"""Digits of a digest that stand in lists: enough for 16 million records."""


_MOST_LETTERS = 200


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
    if any(record.result.throughput is not None for record in records):
        found = [record.result.throughput for record in records]
        columns["full speed"] = ["" if one is None else str(one.batch_size) if one.certain else "?" for one in found]
    if any(record.result.trained for record in records):
        columns["peak in training"] = [_in_training(record.result) for record in records]
    short = {heading: [printable(cell, _MOST_LETTERS) for cell in cells] for heading, cells in columns.items()}
    return Table(f"Cached results at {url}", (), short)


def record_tables(record: Record) -> Iterator[Table]:
    """What one result depends on, and the sizes that were tried for it."""
    key = {name: value for name, value in record.key.as_dict().items() if value not in ({}, "")}
    names = [name.removesuffix("_bytes").replace("_", " ") for name in key]
    values = [printable(_text(value, is_bytes=name.endswith("_bytes")), 2000) for name, value in key.items()]
    result = record.result
    name = printable(record.label or record.key.model[:NAME_DIGITS], _MOST_LETTERS)
    title = f"{name}: max batch {result.max_batch_size}"
    found = f"{printable(result.source, _MOST_LETTERS)}, found {record.created:%Y-%m-%d %H:%M} ({result.stop.value})"
    yield Table(
        title,
        (found, f"record {record.key.digest}"),
        {"depends on": names, "value": values},
        assumptions((printable(text, 400) for text in result.unmodelled), explain=True),
    )
    if result.throughput is not None:
        rates = result.throughput.rates
        yield Table(
            "Sizes timed",
            (str(result.throughput),),
            {
                "batch size": [str(rate.batch_size) for rate in rates],
                "samples/s": [rate.figures for rate in rates],
            },
        )
    if result.trials:
        seen = [trial.measurement for trial in result.trials]
        yield Table(
            "Sizes tried",
            (),
            {
                "batch size": [str(trial.batch_size) for trial in result.trials],
                "verdict": [measurement.verdict.name.lower().replace("_", " ") for measurement in seen],
                "peak allocated": [_text(measurement.peak_allocated_bytes, is_bytes=True) for measurement in seen],
                "peak reserved": [_text(measurement.peak_reserved_bytes, is_bytes=True) for measurement in seen],
                "seconds": [f"{measurement.seconds:.3f}" for measurement in seen],
            },
        )


def _in_training(result: SearchResult) -> str:
    """The peak reserved of the last training, and that of its size when it was tried."""
    if result.trained is None:
        return ""
    size, _, reserved = result.trained
    if reserved is None:
        return ""
    tried = {trial.batch_size: trial.measurement.peak_reserved_bytes for trial in result.trials}.get(size)
    return f"{format_bytes(reserved)} at {size}" + ("" if tried is None else f" (tried: {format_bytes(tried)})")


def _text(value: object, is_bytes: bool = False) -> str:
    if is_bytes and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    return "" if value is None else str(value)
