"""`page`: everything in a cache as one HTML page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields

from batchfinder.cache import Record, Store
from batchfinder.cli.cache import NAME_DIGITS
from batchfinder.cli.options import check_file, write_file
from batchfinder.errors import UnknownName
from batchfinder.models.catalog import find_model
from batchfinder.report.page import PageCell, check_page, page_of
from batchfinder.report.terminal import printable
from batchfinder.training.spec import StepOptions
from batchfinder.units import format_bytes

_MOST_LETTERS = 200


def main(arguments: argparse.Namespace) -> int:
    """Write the page."""
    check_page("FILE", arguments.file)
    check_file("FILE", arguments.file)
    store = Store(arguments.cache)
    records = sorted(
        store.records(), key=lambda record: (name_of(record.label), record.key.gpu, record.key.seq_len or 0)
    )
    url, count = printable(store.url), f"{len(records)} result{'s' * (len(records) != 1)}"
    if records:
        page = page_of("Cached results", f"{count} of {url}", [cell_of_record(one) for one in records])
        write_file("FILE", arguments.file, page)
    if arguments.json:
        written = arguments.file if records else None
        print(json.dumps({"url": store.url, "results": len(records), "file": written}, indent=1))
    else:
        print(f"{count} of {url} written to {arguments.file}" if records else f"the cache at {url} is empty")
    return 0


def name_of(label: str) -> str:
    """What a model is called on the page: by the catalogue's name, also where its repository was named."""
    try:
        return find_model(label).name
    except UnknownName:
        return label


def cell_of_record(record: Record) -> PageCell:
    """What a page has of a cached result."""
    key, result = record.key, record.result
    of_step = {item.name for item in fields(StepOptions)}
    newer = {name: value for name, value in key.extra.items() if name in of_step}
    options = {
        "mode": key.mode,
        "precision": key.precision,
        "optimizer": key.optimizer,
        "attention": key.attention or None,
        "gradient_checkpointing": key.gradient_checkpointing,
        **newer,
    }
    words = StepOptions(**options).words()  # type: ignore[arg-type]
    words += [f"{key.accumulation} micro-batches"] if key.accumulation > 1 else []
    technique = printable(", ".join(map(str, words)), _MOST_LETTERS)
    model = printable(name_of(record.label) or f"({key.model[:NAME_DIGITS]})", _MOST_LETTERS)
    gpu = printable(key.gpu, _MOST_LETTERS)
    at_max = result.measurement if result.max_batch_size else None
    peak = None if at_max is None else at_max.peak_reserved_bytes
    facts = [("largest batch", f"{result.max_batch_size:,}")]
    facts += [] if peak is None else [("peak reserved", format_bytes(peak))]
    facts += [
        ("usable", format_bytes(key.usable_bytes)),
        ("found by", printable(f"{result.source}, on {record.created:%Y-%m-%d %H:%M}", _MOST_LETTERS)),
        ("why the search ended", result.stop.value),
        ("step", technique),
        ("versions", printable(_listed(key.versions), _MOST_LETTERS)),
        ("record", key.digest[:NAME_DIGITS]),
    ]
    length = "" if key.seq_len is None else f" at {key.seq_len}"
    return PageCell(
        model=model,
        gpu=gpu,
        seq_len=key.seq_len,
        technique=technique,
        batch_size=result.max_batch_size,
        heading=f"{model}{length} on {gpu}",
        source=printable(result.source, _MOST_LETTERS),
        peak_bytes=peak,
        usable_bytes=key.usable_bytes,
        facts=facts,
        unmodelled=[printable(text, 400) for text in result.unmodelled],
        throughput=result.throughput,
    )


def _listed(versions: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
