"""Published memory figures beside what batchfinder says for the same training.

Run: `python -m benchmarks.measured [SOURCE ...]`. The result is complete after every row; `--resume` goes on with it.
`--scores` prints those of the results that are there, and records nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchfinder.devices import host_name
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import FAKE_DEVICE, named_recorder
from batchfinder.units import format_bytes
from batchfinder.versions import installed
from benchmarks.measured.case import RESERVED, Case, record
from benchmarks.measured.scores import of_all, of_rows, table, weighted_quantile

HERE = Path(__file__).parent
SOURCES = sorted(path.parent.name for path in HERE.glob("*/cases.py"))
RESULTS = HERE.parent / "results" / "measured"


def main() -> int:
    """Record what was asked for, print a line for each row and the scores, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description=__doc__)
    parser.add_argument("source", nargs="*", help=f"{', '.join(SOURCES)} (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this")
    parser.add_argument("--resume", action="store_true", help="leave out rows that the result has")
    parser.add_argument("--scores", action="store_true", help="of the results that are there; record nothing")
    parser.add_argument("--recorder", type=named_recorder, default=FAKE_DEVICE, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args()
    unknown = set(arguments.source) - set(SOURCES)
    if unknown:
        parser.error(f"no source {', '.join(sorted(unknown))}; there are {', '.join(SOURCES)}")
    sources = arguments.source or SOURCES
    arguments.out.mkdir(parents=True, exist_ok=True)
    for source in () if arguments.scores else sources:
        _run(source, arguments.out / f"{source}.json", arguments.only, arguments.resume, arguments.recorder)
    results = {source: arguments.out / f"{source}.json" for source in sources}
    there = {source: path for source, path in results.items() if path.exists()}
    rows = {source: json.loads(path.read_text(encoding="utf-8"))["rows"] for source, path in there.items()}
    scores = {source: of_rows(found) for source, found in rows.items()}
    for source, found in rows.items():
        scores |= {f"{source}: {name}": of_rows(answers) for name, answers in other_estimators(source, found).items()}
    print(table({**scores, "all sources alike": of_all(rows)}))
    return 0


def other_estimators(source: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What others say of a source's rows, as rows for `scores.of_rows`, by their names.

    That is what the source has of them, and what `python -m benchmarks.memtracker` has recorded, where it has.
    """
    others = dict(getattr(importlib.import_module(f"benchmarks.measured.{source}.cases"), "others", dict)())
    path = RESULTS / "memtracker" / f"{source}.json"
    answers = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    published = {row["name"]: row["published_bytes"] for row in rows}
    tracked = [
        {
            **answer,
            "name": name,
            "published_bytes": published[name],
            "error": answer["predicted_bytes"] / published[name] - 1,
        }
        for name, answer in answers.items()
        if "failed" not in answer
    ]
    return {**others, "PyTorch's MemTracker": tracked} if tracked else others


def _run(source: str, path: Path, only: str, resume: bool, recorder: str) -> None:
    """Record the rows of a source that are asked for, and write its result after each."""
    rows: dict[str, Any] = {}
    if (resume or only) and path.exists():
        rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    cases: list[Case] = list(importlib.import_module(f"benchmarks.measured.{source}.cases").cases())
    asked = [case for case in cases if only in case.name and not (resume and case.name in rows)]
    drawn = [case.drawn() for case in asked]
    answers = record([each for draws in drawn for _, each in draws], recorder)
    for case, draws in zip(asked, drawn, strict=True):
        start = time.perf_counter()
        row, words = _row(case, [(times, *next(answers)) for times, _ in draws])
        row["seconds"] = round(time.perf_counter() - start, 2)
        rows[case.name] = row
        published = "ran" if case.ran else "out of memory"
        published = published if case.published_bytes is None else format_bytes(case.published_bytes)
        print(f"{source} {case.name:<60} {published:>10} {words}", flush=True)
        _write(path, source, [rows[each.name] for each in cases if each.name in rows])


def _row(case: Case, draws: Sequence[tuple[int, Case, Trace | Exception]]) -> tuple[dict[str, Any], str]:
    """What is known of a case and said of it, and the latter in words.

    Args:
        draws: how often each of its draws came, as a case, and that one's recording.
    """
    row: dict[str, Any] = {
        "name": case.name,
        "technique": case.technique,
        "gpu": case.gpu,
        "statistic": case.statistic,
        "published_bytes": case.published_bytes,
        "note": case.note,
    }
    if case.ran:
        row["ran"] = True
    if case.bracket:
        row["bracket"] = case.bracket
    try:
        found: list[tuple[float, int, Trace]] = []  # bytes, infinite where it runs out of memory
        ends: tuple[list[float], list[float]] = [], []  # the least and the most, by address and by age
        for times, each, trace in draws:
            if isinstance(trace, Exception):
                raise trace
            answers = [each.predicted_bytes(trace, by_address) for by_address in (True, False)]
            value, other = (math.inf if answer is None else answer for answer in answers)
            found.append((value, times, trace))
            ends[0].append(min(value, other))
            ends[1].append(max(value, other))
        values, weights = [each[0] for each in found], [each[1] for each in found]
        middle = weighted_quantile(values, weights, 0.5)
        trace = min(found, key=lambda each: abs(each[0] - middle) if each[0] != middle else -1)[2]
        predicted = None if math.isinf(middle) else int(middle)
        row["predicted_bytes"] = predicted
        if case.draws or ends[0] != ends[1]:
            around = [weighted_quantile(end, weights, share) for end, share in zip(ends, (0.05, 0.95), strict=True)]
            row["interval"] = [None if math.isinf(end) else int(end) for end in around]
        if predicted is not None and case.published_bytes is not None and case.statistic == RESERVED:
            row["unsafe"] = case.is_unsafe(trace, predicted)
            if "interval" in row:
                row["unsafe_at_upper"] = case.is_unsafe(trace, predicted, row["interval"][1])
            if case.limits_tried:
                row["reserved_bytes"] = case.with_model(trace, case.published_bytes)
                caps = (predicted, row["interval"][1] if "interval" in row else predicted)
                row["caps"] = [case.limit_of(case.with_model(trace, cap)) for cap in caps]
        for limit, ran in case.limits_tried:
            row.setdefault("limits", []).append([limit, ran, case.runs_within(trace, limit)])
        for context_bytes in case.other_contexts:
            other = replace(case, context_bytes=context_bytes).predicted_bytes(trace)
            row.setdefault("with_context", {})[format_bytes(context_bytes)] = other
        words = "out of memory" if predicted is None else format_bytes(predicted)
        if predicted is not None and case.published_bytes is not None:
            row["error"] = predicted / case.published_bytes - 1
            words = f"{words:>10} {row['error']:+8.2%}"
    except Exception as error:
        # What failed, and with what: the traceback between them names places of this machine.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        row["failed"] = " ".join([f"{type(error).__name__}:", *lines[:1], *lines[1:][-1:]])
        words = row["failed"][:100]
    return row, words


def _write(path: Path, source: str, rows: list[Mapping[str, Any]]) -> None:
    techniques: Iterable[str] = dict.fromkeys(row["technique"] for row in rows)
    result = {
        "benchmark": "measured",
        "source": source,
        "command": f"python -m benchmarks.measured {source}",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": installed("torch", "transformers"),
        "python": platform.python_version(),
        "scores": of_rows(rows),
        "by_technique": {each: of_rows([row for row in rows if row["technique"] == each]) for each in techniques},
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
