"""One HTML file that shows results in a browser: no network, no server, nothing but what is beside this module.

The file holds the figures as JSON, the styles, and the scripts: what draws charts, and what fills the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchfinder.errors import InvalidValue
from batchfinder.memory_use.breakdown import NAMES, OverTime
from batchfinder.report.estimate import Alternative, EstimateFindings
from batchfinder.report.made_by import made_by_words
from batchfinder.report.plots import COLOUR_OF
from batchfinder.report.sweep import SweepRow
from batchfinder.results import Throughput
from batchfinder.training.spec import recorder_in_words
from batchfinder.units import format_bytes

_POINTS, _ALL_POINTS, _LEAST_POINTS = 300, 40_000, 30
"""Of a memory timeline at most; of all timelines of a page, some 3 MB; and the fewest that show anything."""
_UNIT_BYTES = 1024
"""What a timeline's figures count: with seven digits in place of ten."""


@dataclass(frozen=True)
class PageCell:
    """What a page has of one model, GPU and length.

    Attributes:
        technique: the step's options in words.
        batch_size: the largest, or the one that was asked about.
        source: `simulated`, `measured` or `cache`.
        facts: names and texts, as they are listed.
        over_time: memory over the recorded steps.
        kinds: bytes at the peak, by kind.
        changes: rows of a table of options, as `Alternative` has them, with FLOPs in words where they are known.
        throughput: the speed of the sizes that were timed.
    """

    model: str
    gpu: str
    seq_len: int | None
    technique: str
    batch_size: int
    heading: str
    source: str = "simulated"
    peak_bytes: int | None = None
    usable_bytes: int | None = None
    facts: Sequence[tuple[str, str]] = ()
    unmodelled: Sequence[str] = ()
    over_time: OverTime | None = None
    kinds: dict[str, int] | None = None
    changes: Sequence[dict[str, Any]] | None = field(default=None)
    throughput: Throughput | None = None


def check_page(option: str, path: str) -> None:
    """Check before the work that a page can be written.

    Raises:
        InvalidValue: it is not a file that ends in .html.
    """
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise InvalidValue(option, path, "a file that ends in .html, in a folder that exists")


def page_of(title: str, conditions: str, cells: Sequence[PageCell], changes_heading: str = "") -> str:
    """The page as HTML.

    Args:
        conditions: what holds for all of it, in words.
        changes_heading: what the table of options is.
    """
    points = min(_POINTS, _ALL_POINTS // max(1, sum(cell.over_time is not None for cell in cells)))
    if points < _LEAST_POINTS:
        conditions += "; too many cells for their memory over time: sweep fewer at a time to see it"
    data = {
        "conditions": conditions,
        "changes_heading": changes_heading or "What each change would buy",
        "colours": {NAMES[kind]: colour for kind, colour in COLOUR_OF.items()},
        "cells": [_cell_json(cell, points) for cell in cells],
    }
    here = resources.files("batchfinder.report")
    parts = {
        "title": escape(title),
        "footer": escape(f"This page was {made_by_words()}. It needs no network, and sends nothing anywhere."),
        "style": (here / "page.css").read_text("utf-8"),
        "data": _inside_script(json.dumps(data, separators=(",", ":"))),
        "charts": _inside_script((here / "charts.js").read_text("utf-8")),
        "script": _inside_script((here / "page.js").read_text("utf-8")),
    }
    template = (here / "page.html").read_text("utf-8")
    first, *rest = template.split("@")
    # Names and what stands between them take turns: a text that is put in is not looked through for further names.
    return first + "".join(parts[text] if number % 2 == 0 else text for number, text in enumerate(rest))


def _inside_script(text: str) -> str:
    """Text that may stand inside a script element: in strings `<\\/script` is `</script`, also in JSON."""
    return re.sub(r"</(?=script)", r"<\\/", text, flags=re.IGNORECASE).replace("<!--", "<\\u0021--")


def _cell_json(cell: PageCell, points: int) -> dict[str, Any]:
    timeline = None
    if cell.over_time is not None and points >= _LEAST_POINTS:
        timeline = _timeline_json(cell.over_time, points)
    return {
        "model": cell.model,
        "gpu": cell.gpu,
        "seq_len": cell.seq_len,
        "technique": cell.technique,
        "batch_size": cell.batch_size,
        "heading": cell.heading,
        "source": cell.source,
        "peak_bytes": cell.peak_bytes,
        "usable_bytes": cell.usable_bytes,
        "facts": [list(fact) for fact in cell.facts],
        "unmodelled": list(cell.unmodelled),
        "timeline": timeline,
        "kinds": cell.kinds and {NAMES[kind]: size for kind, size in cell.kinds.items()},
        "changes": cell.changes and list(cell.changes),
        "throughput": cell.throughput and _throughput_json(cell.throughput),
    }


def _throughput_json(found: Throughput) -> dict[str, Any]:
    rates = [[rate.batch_size, rate.samples_per_second, rate.spread] for rate in found.rates]
    return {"words": str(found), "full_speed": found.batch_size if found.certain else None, "rates": rates}


def _timeline_json(memory: OverTime, points: int) -> dict[str, Any]:
    """The memory after so many events: of each stretch the one after which most is held, so that no peak is lost."""
    count = len(memory.modules)
    totals = [sum(sizes) for sizes in zip(*memory.by_kind.values(), strict=True)]
    ends = [number * count // points for number in range(points + 1)] if count > points else list(range(count + 1))
    chosen = [max(range(start, end), key=totals.__getitem__) for start, end in pairwise(ends) if end > start]
    names = sorted({memory.modules[event] for event in chosen})
    index = {name: number for number, name in enumerate(names)}
    return {
        "unit": _UNIT_BYTES,
        "positions": chosen,
        "by_kind": {
            NAMES[kind]: [sizes[event] // _UNIT_BYTES for event in chosen] for kind, sizes in memory.by_kind.items()
        },
        "names": names,
        "modules": [index[memory.modules[event]] for event in chosen],
        "marks": [[mark.position, mark.step, mark.stage] for mark in memory.marks],
    }


def changes_json(alternatives: Iterable[Alternative]) -> list[dict[str, Any]]:
    """Rows of the table of options."""
    return [
        {
            "change": one.change,
            "batch_size": one.batch_size,
            "peak_bytes": one.peak_bytes,
            "max_batch_size": one.max_batch_size,
            "error": one.error,
        }
        for one in alternatives
    ]


def cell_of_row(row: SweepRow) -> PageCell:
    """What a page has of a row of a sweep."""
    cell, result, seen, plan = row.cell, row.result, row.at_max, row.plan
    facts = [("largest batch", f"{result.max_batch_size:,}")]
    if cell.options.packed:
        facts.append(("tokens per step", f"{row.tokens_per_step:,}"))
    if cell.published is not None:
        facts.append(("published", str(cell.published)))
    if seen is not None and seen.peak_reserved_bytes is not None:
        facts.append(("peak reserved", format_bytes(seen.peak_reserved_bytes)))
    if seen is not None and seen.peak_allocated_bytes is not None:
        facts.append(("peak allocated", format_bytes(seen.peak_allocated_bytes)))
    if row.needed_bytes is not None:
        facts.append(("the smallest size would take", row.need_words))
    facts.append(("usable", format_bytes(cell.card.device.usable_bytes)))
    if cell.headroom_bytes:
        facts.append(("kept free", format_bytes(cell.headroom_bytes)))
    if row.stopped_by is not None:
        facts.append(("the next size", row.stopped_by.name.lower().replace("_", " ")))
    if plan is not None:
        facts.append(("micro-batch x accumulation", str(plan)))
    technique = ", ".join(cell.options.words())
    facts += [("found by", "cache, " + result.source if row.cached else result.source), ("step", technique)]
    if row.recorder_version:
        facts.append(("recorder", row.recorder_in_words))
    return PageCell(
        model=cell.model,
        gpu=cell.card.name,
        seq_len=cell.seq_len,
        technique=technique,
        batch_size=result.max_batch_size,
        heading=str(cell),
        source=result.source,
        peak_bytes=None if seen is None else seen.peak_reserved_bytes,
        usable_bytes=cell.card.device.usable_bytes,
        facts=facts,
        unmodelled=result.unmodelled,
        over_time=row.over_time,
        changes=None if row.changes is None else changes_json(row.changes),
        throughput=row.throughput,
    )


def cell_of_estimate(found: EstimateFindings, over_time: OverTime) -> PageCell:
    """What a page has of an estimate."""
    one, asked = found.estimate, found.request
    trace = one.trace
    length = "" if trace.seq_len is None else f", sequence length {trace.seq_len}"
    facts = [
        ("fits", "yes" if one.fits else "no"),
        ("peak, all in", format_bytes(one.peak_bytes)),
        ("peak allocated", format_bytes(one.allocated_bytes)),
        ("peak reserved", format_bytes(one.reserved_bytes)),
        ("the GPU has", format_bytes(one.capacity_bytes)),
        ("the smallest GPU that runs it has", format_bytes(one.required_bytes)),
    ]
    facts += [(f"peak with {name}", format_bytes(each.peak_bytes)) for name, each in found.strategies.items()]
    facts.append(("recorder", recorder_in_words(asked.options.recorder, found.recorder_version)))
    return PageCell(
        model=asked.model,
        gpu=asked.card.name,
        seq_len=trace.seq_len,
        technique=", ".join(asked.options.words()),
        batch_size=trace.batch_size,
        heading=f"{asked.model} at batch size {trace.batch_size}{length} on {asked.card.name}",
        peak_bytes=one.reserved_bytes,
        usable_bytes=asked.card.device.usable_bytes,
        facts=facts,
        unmodelled=found.unmodelled,
        over_time=over_time,
        kinds=one.kinds.shown(),
        changes=None if found.alternatives is None else changes_json(found.alternatives),
    )
