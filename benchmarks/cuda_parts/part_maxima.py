"""(b) Predicted beside true largest batches under budgets, with and without expandable segments."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from batchfinder.simulator.alloc_conf import DEFAULT_SETTINGS, AllocatorSettings
from benchmarks.cuda_parts import cells
from benchmarks.cuda_parts.cells import Ladder
from benchmarks.cuda_parts.check import Check
from benchmarks.cuda_parts.far_end import Failed, FarEnd
from benchmarks.cuda_parts.maxima import Unsettled, true_maximum

NAME = "maxima"
STEPS = 3
_EXPANDABLE = AllocatorSettings(expandable_segments=True)
_EXPANDABLE_ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

Asked = list[tuple[Ladder, bool, "Future[list[dict[str, Any]]]"]]


def ask(check: Check) -> Asked:
    """Ask for the predictions.

    Args:
        check: the run.
    """
    stand_ins = cells.STAND_IN_LADDERS if check.dry_run else ()
    pairs = [(ladder, False) for ladder in stand_ins]
    pairs += [(ladder, expandable) for expandable in (False, True) for ladder in cells.LADDERS]
    return [
        (ladder, expandable, check.predictions.largest(ladder, _EXPANDABLE if expandable else DEFAULT_SETTINGS))
        for ladder, expandable in pairs
        if check.wanted(ladder.name)
    ]


def run(check: Check, asked: Asked) -> None:
    """Find the true maxima.

    Args:
        check: the run.
        asked: by `ask`.
    """
    _ladders(check, check.far, [one for one in asked if not one[1]])
    check.far.close()  # its context would take of the card
    with check.new_far_end(_EXPANDABLE_ENVIRONMENT) as far:  # it is read when the process takes its first memory
        _ladders(check, far, [one for one in asked if one[1]])


def _ladders(check: Check, far: FarEnd, asked: Asked) -> None:
    for ladder, expandable, future in asked:
        head = {"name": ladder.name, "expandable_segments": expandable, "stand_in": ladder.cell.stand_in}
        for row in _rows(check, ladder, future, far):
            check.found(NAME, {**head, **row})


def _rows(check: Check, ladder: Ladder, future: Future[list[dict[str, Any]]], far: FarEnd) -> Iterator[dict[str, Any]]:
    if not check.in_time(NAME, ladder.name):
        return
    try:
        predicted = future.result(timeout=max(1.0, check.clock.left(NAME)))
    except Exception as error:
        yield {"error": f"no prediction: {type(error).__name__}: {error}"}
        return
    for row in predicted:
        if check.dry_run and not ladder.cell.stand_in:
            yield row
        elif row["budget_bytes"] > check.card.free_bytes:
            yield {**row, "skipped": "the card has less than this budget free"}
        elif check.in_time(NAME, f"{ladder.name} under {row['budget_bytes']} bytes"):
            yield {**row, **_true(check, ladder, row, far)}


def _true(check: Check, ladder: Ladder, row: dict[str, Any], far: FarEnd) -> dict[str, Any]:
    """The largest size that trains; the largest that does so without giving back its cache; and all that was tried."""
    tried: dict[int, dict[str, Any]] = {}

    def trains(size: int) -> bool:
        if check.clock.left(NAME) <= 0:
            raise Unsettled
        cell = asdict(replace(ladder.cell, batch_size=size))
        request = {"measure": {"cell": cell, "steps": STEPS, "limit_bytes": row["budget_bytes"]}}
        tried[size] = check.ask(far, request, NAME)
        return bool(tried[size]["ran"])

    try:
        answer: dict[str, Any] = {"true": true_maximum(trains, row["predicted"])}
    except Unsettled:
        answer = {"error": f"the time was over after {len(tried)} sizes"}
    except Failed as error:
        answer = {"error": str(error)}
    else:
        calm = [size for size, seen in tried.items() if seen["ran"] and not seen["retries"]]
        answer["true_without_retries"] = max(calm, default=0)
    answer["tried"] = [[size, int(tried[size]["ran"]), tried[size]["retries"]] for size in sorted(tried)]
    return answer
