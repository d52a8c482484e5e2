"""(a) Predicted beside measured memory, stage by stage."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from batchfinder.simulator.trace import Trace
from benchmarks.cuda_parts import cells
from benchmarks.cuda_parts.cells import Cell
from benchmarks.cuda_parts.check import Check
from benchmarks.cuda_parts.stages import beside, peaks

NAME = "cells"
_FULL = 0.97
"""Of what is free: a step that is predicted to reserve more is not tried, as its failure would say nothing."""

Asked = list[tuple[Cell, "Future[Trace]"]]


def ask(check: Check) -> Asked:
    """Ask for the predictions.

    Args:
        check: the run.
    """
    listed = (*(cells.STAND_IN_CELLS if check.dry_run else ()), *cells.CELLS)
    return [(cell, check.predictions.trace(cell)) for cell in listed if check.wanted(cell.name)]


def run(check: Check, asked: Asked) -> None:
    """Measure each cell.

    Args:
        check: the run.
        asked: by `ask`.
    """
    check.far.start()
    for cell, future in asked:
        if check.in_time(NAME, cell.name):
            check.found(NAME, _row(check, cell, future))


def _row(check: Check, cell: Cell, future: Future[Trace]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": cell.name, **asdict(cell), "model": cell.name.split()[0], "stand_in": cell.stand_in}
    try:
        trace = future.result(timeout=max(1.0, check.clock.left(NAME)))
        row["unmodelled"] = list(trace.unmodelled)
        predicted, message = check.predictions.stages(trace)
        reserved = peaks(predicted)["peak_reserved_bytes"]
        if message or reserved > _FULL * check.card.free_bytes:
            return {**row, "skipped": "predicted to need more than the card has free"}
        row["predicted"] = peaks(predicted)
        if check.dry_run and not cell.stand_in:
            return row
        answer = check.ask(check.far, {"measure": {"cell": asdict(cell), "steps": 2}}, NAME)
        if answer["ran"]:
            row["measured"] = peaks(answer["stages"])
            row["stages"] = beside(predicted, answer["stages"])
        else:
            row["error"] = answer["message"]
        row["details"] = {name: answer[name] for name in answer if name not in ("stages", "ran", "message")}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row
