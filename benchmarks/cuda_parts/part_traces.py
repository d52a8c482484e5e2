"""(c) Recorded steps beside the history of the card's allocator."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.trace import Trace
from benchmarks.cuda_parts import cells
from benchmarks.cuda_parts.cells import Cell
from benchmarks.cuda_parts.check import Check
from benchmarks.cuda_parts.history import simulated_history
from benchmarks.cuda_parts.trace_check import compare

NAME = "traces"

Asked = list[tuple[Cell, "Future[Trace]"]]


def ask(check: Check) -> Asked:
    """Ask for the recordings.

    Args:
        check: the run.
    """
    listed = (*(cells.STAND_IN_TRACED if check.dry_run else ()), *cells.TRACED)
    return [(cell, check.predictions.trace(cell)) for cell in listed if check.wanted(cell.name)]


def run(check: Check, asked: Asked) -> None:
    """Compare each.

    Args:
        check: the run.
        asked: by `ask`.
    """
    with tempfile.TemporaryDirectory(prefix="batchfinder-") as folder:
        for number, (cell, future) in enumerate(asked):
            if not check.in_time(NAME, cell.name):
                continue
            row: dict[str, Any] = {"name": cell.name, "stand_in": cell.stand_in}
            try:
                trace = future.result(timeout=max(1.0, check.clock.left(NAME)))
                row |= _compared(check, cell, trace, Path(folder) / f"{number}.json.gz")
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
            check.found(NAME, row)


def _compared(check: Check, cell: Cell, trace: Trace, path: Path) -> dict[str, Any]:
    if check.dry_run and not cell.stand_in:
        # In the place of a card's: all of it must be found again.
        history = simulated_history(trace, CachingAllocator(check.card.memory()))
        return {"against": "the simulator's own snapshot", **compare(trace, history)}
    answer = check.ask(check.far, {"history": {"cell": asdict(cell), "steps": 2}, "path": str(path)}, NAME)
    if not answer["ran"]:
        return {"error": answer["message"]}
    if check.keep is not None:
        check.keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, check.keep / f"{cell.name.replace(' ', '-')}.json.gz")
    with gzip.open(path, "rt") as file:
        return {"against": check.device, **compare(trace, json.load(file))}
