"""The default sweep with an empty cache against `from transformers import BertForSequenceClassification`.

Once by the fake device's recordings, and where PyTorch's CUDA build is installed, once by sizes tried on it. All are
whole processes, imports included, and take turns. Run: `python benchmarks/sweep_seconds.py [--rounds 5]`.
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
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.cuda_stub import StubUnavailable, find_build
from batchfinder.devices import host_name
from batchfinder.training.spec import CUDA_BUILD, FAKE_DEVICE
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
    imports: list[float] = []
    sweeps: dict[str, list[float]] = {FAKE_DEVICE: []}
    rows: dict[str, list[dict[str, Any]]] = {}
    with suppress(StubUnavailable):
        find_build()
        sweeps[CUDA_BUILD] = []
    for _ in range(rounds):
        imports.append(seconds(IMPORT, dict(os.environ))[0])
        for recorder, of_it in sweeps.items():
            with tempfile.TemporaryDirectory() as cache:
                taken, output = seconds((*SWEEP, "--recorder", recorder), {**os.environ, "BATCHFINDER_CACHE": cache})
            of_it.append(taken)
            rows[recorder] = json.loads(output)["rows"]
    imported = statistics.median(imports)
    medians = {recorder: statistics.median(of_it) for recorder, of_it in sweeps.items()}
    result = {
        "benchmark": "sweep_seconds",
        "command": "python benchmarks/sweep_seconds.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": installed("torch", "transformers"),
        "python": platform.python_version(),
        "cells": len(rows[FAKE_DEVICE]),
        "sizes": {recorder: [row["max_batch_size"] for row in of_it] for recorder, of_it in rows.items()},
        "import_seconds": [round(value, 2) for value in imports],
        "sweep_seconds": {recorder: [round(value, 2) for value in of_it] for recorder, of_it in sweeps.items()},
        "median_ratio": {recorder: round(median / imported, 2) for recorder, median in medians.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"sweep_seconds-{os.cpu_count()}-cores.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for recorder, median in medians.items():
        print(f"{recorder}: sweep {median:.1f} s, import {imported:.1f} s, {median / imported:.2f}x")


if __name__ == "__main__":
    main()
