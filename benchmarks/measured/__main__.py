"""Published memory figures beside what batchfinder says for the same training.

Run: `python -m benchmarks.measured [SOURCE ...]`. The result is complete after every row; `--resume` goes on with it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchfinder.devices import host_name
from batchfinder.units import format_bytes
from benchmarks.measured.case import record, scores

HERE = Path(__file__).parent
SOURCES = sorted(path.parent.name for path in HERE.glob("*/cases.py"))


def main() -> int:
    """Record what was asked for, print a line for each row and the scores, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description=__doc__)
    parser.add_argument("source", nargs="*", help=f"{', '.join(SOURCES)} (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this")
    parser.add_argument("--resume", action="store_true", help="leave out rows that the result has")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "measured", metavar="FOLDER")
    arguments = parser.parse_args()
    unknown = set(arguments.source) - set(SOURCES)
    if unknown:
        parser.error(f"no source {', '.join(sorted(unknown))}; there are {', '.join(SOURCES)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for source in arguments.source or SOURCES:
        path = arguments.out / f"{source}.json"
        rows: dict[str, Any] = {}
        if (arguments.resume or arguments.only) and path.exists():
            rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
        asked = list(importlib.import_module(f"benchmarks.measured.{source}.cases").cases())
        names = [case.name for case in asked]
        asked = [case for case in asked if arguments.only in case.name]
        if arguments.resume:
            asked = [case for case in asked if case.name not in rows]
        start = time.perf_counter()
        for case, trace in record(asked):
            row: dict[str, Any] = {
                "name": case.name,
                "technique": case.technique,
                "gpu": case.gpu,
                "statistic": case.statistic,
                "published_bytes": case.published_bytes,
                "note": case.note,
            }
            try:
                if isinstance(trace, Exception):
                    raise trace
                predicted = case.predicted_bytes(trace)
                row |= {"predicted_bytes": predicted, "error": predicted / case.published_bytes - 1}
                words = f"{format_bytes(predicted):>10} {row['error']:+8.2%}"
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"
                words = row["failed"].splitlines()[0][:100]
            row["seconds"] = round(time.perf_counter() - start, 2)
            start = time.perf_counter()
            rows[case.name] = row
            print(f"{source} {case.name:<60} {format_bytes(case.published_bytes):>10} {words}", flush=True)
            ordered = [rows[name] for name in names if name in rows]
            errors = [row["error"] for row in ordered if "error" in row]
            techniques = dict.fromkeys(row["technique"] for row in ordered)
            result = {
                "benchmark": "measured",
                "source": source,
                "command": f"python -m benchmarks.measured {source}",
                "date": datetime.now(UTC).date().isoformat(),
                "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
                "versions": {name: version(name) for name in ("batchfinder", "torch", "transformers")},
                "python": platform.python_version(),
                "scores": scores(errors),
                "by_technique": {
                    technique: scores([r["error"] for r in ordered if "error" in r and r["technique"] == technique])
                    for technique in techniques
                },
                "failed": sum("failed" in row for row in ordered),
                "rows": ordered,
            }
            path.write_text(json.dumps(result, indent=1) + "\n")
        if path.exists():
            print(f"{source}: {json.dumps(json.loads(path.read_text())['scores'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
