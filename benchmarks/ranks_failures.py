"""Searches of several gloo ranks with `fully_shard` on a CPU: under a real limit, and with failures on each rank.

Under a limit (RLIMIT_AS, lower on the last rank) all ranks must find one size, train 50 steps with it, and fail with a
tenth more. Injected is an out-of-memory error on one rank, in the forward, the backward, the optimizer step and the
second collective of a backward: all ranks must find the same smaller size, hang nowhere, and have weights, gradients,
optimizer state, losses and the random state back bit for bit. The cases are those of `tests.loop.rank_loops`, which the
tests run once each.

Run: `python benchmarks/ranks_failures.py [--ranks 2 4] [--repetitions 20] [--resume]`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import host_name
from batchfinder.versions import installed
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
        return {"ranks": size, "seconds": seconds, "failed": ended, "as it should be": False}
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


def with_failures(ranks: Forks, size: int, times: int) -> dict[str, Any]:
    """Searches of one number of ranks, so many times with a failure in each stage of each rank."""
    start, wrong, longest = time.perf_counter(), [], 0.0
    for rank, answer in enumerate(ranks.run(size=size, case="injected", kind="fsdp", times=times, seconds=SECONDS)):
        if isinstance(answer, str):  # it hung or raised
            wrong.append([rank, answer])
        else:
            wrong += [[rank, *each] for each in answer[0]]
            longest = max(longest, answer[1])
    return {
        "ranks": size,
        "repetitions": times,
        "searches": times * size * len(STAGES),
        "wrong": wrong,
        "longest search, seconds": round(longest, 2),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> int:
    """Run all cases, and print a line for each; the result is complete after each of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--repetitions", type=int, default=20, metavar="N")
    parser.add_argument("--resume", action="store_true", help="go on with the result that is there")
    parser.add_argument("--out", type=Path, default=RESULTS / f"ranks_failures-{os.cpu_count()}-cores.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"limited": [], "injected": []}
    if arguments.resume and arguments.out.exists():
        result = json.loads(arguments.out.read_text(encoding="utf-8"))
    result |= {
        "benchmark": "ranks_failures",
        "command": "python benchmarks/ranks_failures.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
        "versions": installed("torch"),
        "python": platform.python_version(),
        "stages": list(STAGES),
    }

    def add(part: str, found: dict[str, Any]) -> None:
        result[part].append(found)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(part, found, flush=True)

    with forks("tests.loop.rank_loops") as ranks:
        for size in arguments.ranks:
            if size not in [each["ranks"] for each in result["limited"]]:
                add("limited", under_a_limit(ranks, size))
        for size in arguments.ranks:
            while (
                left := arguments.repetitions
                - sum(each["repetitions"] for each in result["injected"] if each["ranks"] == size)
            ) > 0:
                add("injected", with_failures(ranks, size, min(2, left)))
    wrong = [each for each in result["limited"] if not each["as it should be"]]
    wrong += [each for each in result["injected"] if each["wrong"]]
    print(f"{len(wrong)} not as it should be" if wrong else "all as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
