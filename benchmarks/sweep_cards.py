"""The default sweep's models and lengths on every GPU of the catalogue, against the same on one GPU.

Both are whole processes without a cache, and take turns. The rows of a GPU must be those of a sweep of that GPU alone,
which is checked on every sixteenth; where `--against` names what `sweep --json` of another version printed for all of
them, answers that differ are listed. Run: `python benchmarks/sweep_cards.py [--rounds 3] [--against FILE]` on an
otherwise idle machine: on a busy one only the processor's seconds mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import all_gpus, host_name
from batchfinder.versions import installed

os.environ.setdefault("BATCHFINDER_RECORDER", "fake-device")  # as where no CUDA build is installed

RESULTS = Path(__file__).parent / "results"
ONE = "Titan X Pascal"
OF_THE_RUN = {"seconds"}
"""What differs from run to run; all else of a row must be the same."""


def swept(gpus: list[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """One `batchfinder sweep` as a process: its seconds and processor seconds, and its rows."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "batchfinder", "sweep", "--json", "--no-cache", *[f"--gpu={gpu}" for gpu in gpus]]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 2), "processor_seconds": round(processor, 2)}, json.loads(done.stdout)["rows"]


def main() -> None:
    """Measure, check the answers, print the ratio, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument(
        "--against", type=Path, help="rows of the same GPUs, as another version's `sweep --json` has them"
    )
    arguments = parser.parse_args()
    rounds = arguments.rounds
    names = [gpu.name for gpu in all_gpus()]
    one, every, rows = [], [], []
    for _ in range(rounds):
        one.append(swept([ONE])[0])
        taken, rows = swept(names)
        every.append(taken)
    checked, same = 0, 0
    for name in names[::16]:
        for row in swept([name])[1]:
            checked += 1
            mine = {key: value for key, value in row.items() if key not in OF_THE_RUN}
            same += any(mine == {key: other[key] for key in other.keys() - OF_THE_RUN} for other in rows)
    changed: list[dict[str, Any]] = []
    others = {} if arguments.against is None else json.loads(arguments.against.read_text())
    for row, other in zip(rows, others.get("rows", rows), strict=True):
        cell = {name: row[name] for name in ("model", "seq_len", "gpu")}
        assert cell == {name: other[name] for name in cell}
        if row["max_batch_size"] != other["max_batch_size"]:
            changed.append({**cell, "then": other["max_batch_size"], "now": row["max_batch_size"]})
    medians = [{name: statistics.median(each[name] for each in taken) for name in taken[0]} for taken in (one, every)]
    result = {
        "benchmark": "sweep_cards",
        "command": f"python benchmarks/sweep_cards.py --rounds {rounds}",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None, "load_at_the_end": os.getloadavg()},
        "versions": installed("torch", "transformers"),
        "python": platform.python_version(),
        "gpus": len(names),
        "cells": len(rows),
        "one_gpu": one,
        "all_gpus": every,
        "median_ratio": {name: round(medians[1][name] / medians[0][name], 2) for name in medians[0]},
        "rows_checked": checked,
        "rows_as_alone": same,
        "answers_changed": changed if others else None,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"sweep_cards-{os.cpu_count()}-cores.json").write_text(json.dumps(result, indent=1) + "\n")
    ratio = result["median_ratio"]
    print(f"{len(names)} GPUs, {len(rows)} cells: {ratio} times one GPU; {same} of {checked} rows as alone")
    print("changed:", *changed or ["none"])


if __name__ == "__main__":
    main()
