"""The default sweep with an empty cache against `from transformers import BertForSequenceClassification`.

Both are whole processes, imports included, and take turns. Run: `python benchmarks/sweep_seconds.py [--rounds 5]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import host_name
from batchfinder.versions import installed

SWEEP = ("-m", "batchfinder", "sweep", "--json")
IMPORT = ("-c", "from transformers import BertForSequenceClassification")
RESULTS = Path(__file__).parent / "results"


def seconds(arguments: tuple[str, ...], environment: dict[str, str]) -> tuple[float, str]:
    """Wall seconds of one Python process, and what it printed."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - start, done.stdout.decode()


def main() -> None:
    """Measure, print the ratio, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each (default: 5)")
    rounds = parser.parse_args().rounds
    imports, sweeps, cells = [], [], 0
    for _ in range(rounds):
        imports.append(seconds(IMPORT, dict(os.environ))[0])
        with tempfile.TemporaryDirectory() as cache:
            taken, output = seconds(SWEEP, {**os.environ, "BATCHFINDER_CACHE": cache})
        sweeps.append(taken)
        cells = len(json.loads(output)["rows"])
    ratio = statistics.median(sweeps) / statistics.median(imports)
    result = {
        "benchmark": "sweep_seconds",
        "command": "python benchmarks/sweep_seconds.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": installed("torch", "transformers"),
        "python": platform.python_version(),
        "cells": cells,
        "import_seconds": [round(value, 2) for value in imports],
        "sweep_seconds": [round(value, 2) for value in sweeps],
        "median_ratio": round(ratio, 2),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"sweep_seconds-{os.cpu_count()}-cores.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    sweep, imported = statistics.median(sweeps), statistics.median(imports)
    print(f"{cells} cells: sweep {sweep:.1f} s, import {imported:.1f} s, {ratio:.2f}x")


if __name__ == "__main__":
    main()
