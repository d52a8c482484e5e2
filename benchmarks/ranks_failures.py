"""Searches of several gloo ranks with `fully_shard` on a CPU: under a real limit, and with failures on each rank.

Under a limit (RLIMIT_AS, lower on the last rank) all ranks must find one size, train 50 steps with it, and fail with a
tenth more. Injected is an out-of-memory error on one rank, in the forward, the backward, the optimizer step and the
second collective of a backward: all ranks must find the same smaller size, hang nowhere, and have weights, gradients,
optimizer state, losses and the random state back bit for bit. The cases are those of `tests.loop.rank_loops`, which the
tests run once each.

Run: `python benchmarks/ranks_failures.py [--ranks 2 4] [--repetitions 20]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import host_name
from tests.forks import Forks, forks
from tests.loop.rank_loops import STAGES

RESULTS = Path(__file__).parent / "results"
STEPS, MORE = 50, 0.1
LIMITS_MIB = {"limit_mib": 192, "lower_mib": 32}
SECONDS = 1200  # for what the ranks of one request do, which share the machine's cores


def under_a_limit(ranks: Forks, size: int) -> dict[str, Any]:
    """What the ranks of one search under a real limit came to."""
    start = time.perf_counter()
    ended = ranks.run(size=size, case="limited", kind="fsdp", steps=STEPS, more=MORE, seconds=SECONDS, **LIMITS_MIB)
    seconds = round(time.perf_counter() - start, 1)
    if any(isinstance(each, str) for each in ended):  # a rank that hung or raised
        return {"ranks": size, "seconds": seconds, "failed": ended}
    failed = [each["beyond"] != ["ran"] for each in ended]
    return {
        "ranks": size,
        "seconds": seconds,
        "sizes": [each["size"] for each in ended],
        "steps": [each["at"] for each in ended],
        "a tenth more": [each["beyond"] for each in ended],
        "tries": len(ended[0]["tries"]),
        "as it should be": len({each["size"] for each in ended}) == 1
        and all(each["at"] == [STEPS, "ran"] for each in ended)
        and any(failed),
    }


def with_failures(ranks: Forks, size: int, repetitions: int) -> dict[str, Any]:
    """The searches of one number of ranks: each repetition has a failure in each stage of each rank."""
    start, searches, wrong, longest = time.perf_counter(), 0, [], 0.0
    for done in range(0, repetitions, 2):
        times = min(2, repetitions - done)
        for rank, answer in enumerate(ranks.run(size=size, case="injected", kind="fsdp", times=times, seconds=SECONDS)):
            if isinstance(answer, str):
                wrong.append([rank, answer])
                continue
            wrong += [[rank, *each] for each in answer[0]]
            longest = max(longest, answer[1])
        searches += times * size * len(STAGES)
        print(f"{size} ranks: {searches} searches, {len(wrong)} wrong", flush=True)
    return {
        "ranks": size,
        "stages": list(STAGES),
        "repetitions": repetitions,
        "searches": searches,
        "wrong": wrong,
        "longest search, seconds": round(longest, 2),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> int:
    """Run all cases, print a line for each, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--repetitions", type=int, default=20, metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS / f"ranks_failures-{os.cpu_count()}-cores.json")
    arguments = parser.parse_args()
    with forks("tests.loop.rank_loops") as ranks:
        limited = []
        for size in arguments.ranks:
            limited.append(under_a_limit(ranks, size))
            print(f"under a limit: {limited[-1]}", flush=True)
        injected = [with_failures(ranks, size, arguments.repetitions) for size in arguments.ranks]
    result = {
        "benchmark": "ranks_failures",
        "command": "python benchmarks/ranks_failures.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": {name: version(name) for name in ("batchfinder", "torch")},
        "python": platform.python_version(),
        "limited": limited,
        "injected": injected,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    right = all(each.get("as it should be") for each in limited) and not any(each["wrong"] for each in injected)
    print("all as it should be" if right else "NOT as it should be")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
