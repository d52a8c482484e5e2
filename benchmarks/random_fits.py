"""Whether the sizes that the callback finds train, and how much larger ones would: random fits on the CUDA stub.

Each seed draws a network, its data, a trainer and a card (`random_fit/draw.py`). The callback searches, the fit goes on
for 200 batches and two epochs at least, and then larger sizes are trained until one runs out of memory or has the
allocator give its cache back. Needs `batchfinder stub install`, peft and bitsandbytes. Run:
`python benchmarks/random_fits.py`; `--seeds 0:30` takes these alone, `--dry-run` takes one, does not look for a larger
size, and writes nothing. Seeds that the result file has are kept, so that a run that was stopped goes on; `--again`
takes them again. `--reserved` trains fits of free lengths without a limit instead: what they reserve as batches go by,
beside what they allocate. `--here` has the fits on this machine's card, as many processes at once as `--jobs` says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # import from the repository

from batchfinder.testing import CudaStub  # noqa: E402
from batchfinder.units import GIB  # noqa: E402
from benchmarks.random_fit.draw import draw  # noqa: E402
from benchmarks.random_fit.run import reserved_of, results_of  # noqa: E402

AT_ONCE = 3
"""Seeds that a process takes, which imports everything once."""


def median(numbers: Iterable[float]) -> float | None:
    """Of the numbers; None for none."""
    known = list(numbers)
    return statistics.median(known) if known else None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, shares of the largest sizes, tries and errors of those that came to an end."""
    ended = [row for row in rows if "failed" not in row]
    shares = [row.get("share", row.get("share_at_least")) for row in ended]
    known = [share for share in shares if share is not None]
    return {
        "fits": len(rows),
        "did not end": len(rows) - len(ended),
        "train": sum(row["trains"] for row in ended),
        "compared with larger sizes": len(known),
        "at 0.97 of the largest or more": sum(share >= 0.97 for share in known),
        "below 0.9": sum(share < 0.9 for share in known),
        "tries, median": median(len(row["tries"]) for row in ended if "tries" in row),
        "out-of-memory errors, median": median(row["errors"] for row in ended if "errors" in row),
        "search seconds, median": median(row["search_seconds"] for row in ended if "search_seconds" in row),
    }


def reserved_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Least, median and most of the shares, without and with expandable segments."""
    found: dict[str, Any] = {}
    for name, expandable in (("plain", False), ("expandable segments", True)):
        some = [row for row in rows if "reserved" in row and (", expandable" in row["fit"]) == expandable]
        of_eight = [row["reserved"]["150"] / row["reserved"]["8"] for row in some]
        of_peak = [row["reserved"]["150"] / row["peak"] for row in some]
        for what, shares in (("after 150 batches, of after 8", of_eight), ("after 150 batches, of allocated", of_peak)):
            found[f"{name}, {what}"] = [round(each(shares), 3) for each in (min, statistics.median, max)]
    return {"fits": len(rows), "did not end": sum("reserved" not in row for row in rows), **found}


def main() -> None:
    """Run the seeds on all cores and print a line for each, and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:300", help="first:end; several of them by commas")
    parser.add_argument("--dry-run", action="store_true", help="one seed, without larger sizes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: the cores)")
    parser.add_argument("--again", action="store_true", help="take seeds again that the result file has")
    parser.add_argument("--reserved", action="store_true", help="what fits of free lengths reserve without a limit")
    parser.add_argument("--here", metavar="FILE", help="on this machine's card, into a file")
    parser.add_argument("--most-memory", type=int, default=80, metavar="GIB", help="fits on cards of no more than this")
    options = parser.parse_args()
    name = "random_fits_reserved" if options.reserved else "random_fits"
    output = Path(options.here or ROOT / f"benchmarks/results/{name}-{os.cpu_count()}-cores.json")
    ranges = [tuple(map(int, each.split(":"))) for each in options.seeds.split(",")]
    seeds = [seed for first, end in ranges for seed in range(first, end)][: 1 if options.dry_run else None]
    rows: list[dict[str, Any]] = []
    if output.exists() and not options.dry_run:
        kept = json.loads(output.read_text())["fits"]
        rows = [row for row in kept if not options.again or row["seed"] not in seeds]
    seeds = [seed for seed in seeds if seed not in {row["seed"] for row in rows}]
    seeds = [seed for seed in seeds if draw(seed).memory_bytes <= options.most_memory * GIB]
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    source = subprocess.run(described, capture_output=True, text=True).stdout.strip()
    lock = threading.Lock()

    def write() -> None:
        rows.sort(key=lambda row: row["seed"])
        result = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": {name: version(name) for name in ("torch", "pytorch-lightning", "transformers")},
            "command": " ".join(["python benchmarks/random_fits.py", *sys.argv[1:]]),
            "summary": reserved_summary(rows) if options.reserved else summary(rows),
            "fits": rows,
        }
        output.write_text(json.dumps(result, indent=1) + "\n")

    def run(some: list[int]) -> None:
        wanted = {} if options.reserved else {"largest": not options.dry_run}
        work = reserved_of if options.reserved else results_of
        if options.here:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                taken = process.submit(work, some, **wanted).result()
        else:
            taken = CudaStub(timeout=3600.0).run(work, some, **wanted).result
        with lock:
            for row in taken:
                rows.append({**row, "source": source})
                print(json.dumps(row), flush=True)
            if not options.dry_run:
                write()

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, [seeds[index : index + AT_ONCE] for index in range(0, len(seeds), AT_ONCE)]))
    print(json.dumps(reserved_summary(rows) if options.reserved else summary(rows), indent=1))


if __name__ == "__main__":
    main()
