"""The summary, the table and the exit code that a result comes to."""

from __future__ import annotations

from typing import Any

import pytest

from batchfinder.units import GIB
from benchmarks.cuda.report import has_failed, report, summary


def test_the_summary_counts_what_was_measured() -> None:
    """Errors in per cent of the measured figure, stand-ins left out; the table says the rest."""
    result = _result()
    result["summary"] = found = summary(result)
    assert found == {
        "cells_measured": 2,
        "allocated_error_percent": {"median": 1.5, "max": 2.0},
        "reserved_error_percent": {"median": 10.0, "max": 20.0},
        "maxima_measured": 1,
        "maxima_error_percent": {"median": 10.0, "max": 10.0},
    }
    lines = [" ".join(line.split()) for line in report(result).splitlines()]
    assert "one 4.04 GiB 4.00 GiB 1.0100 8.00 GiB 8.00 GiB 1.0000" in lines
    assert "three the card went up in smoke" in lines
    assert "tiny 9.00 GiB 3.00 GiB 3.0000 9.00 GiB 3.00 GiB 3.0000 stand-in" in lines
    assert "one 12.00 GiB no 90 100 88 99" in lines
    assert "allocated error percent: median 1.5, max 2.0" in lines
    assert "tests marked gpu: 3 passed, 1 failed" in lines
    assert "failed: tests/x.py::test_y" in lines
    assert "not reached: callback: conv net" in lines


@pytest.mark.parametrize("part", ["errors", "cells", "tests", ""])
def test_what_failed_ends_the_check_with_1(part: str) -> None:
    """A part, a row or a test; what was skipped for want of memory is no failure."""
    result = _result()
    result["cells"] = [{"name": "big", "skipped": "predicted to need more than the card has free"}]
    result["tests"] = {"not_passed": {}}
    if part in ("errors", "cells"):
        result[part].append({"error": "it failed"})
    elif part:
        result[part]["not_passed"] = {"tests/x.py::test_y": "failed"}
    assert has_failed(result) is bool(part)


def _result() -> dict[str, Any]:
    def cell(
        name: str, allocated: tuple[float, float], reserved: tuple[float, float], stand_in: bool
    ) -> dict[str, Any]:
        both = [
            {"peak_allocated_bytes": int(a * GIB), "peak_reserved_bytes": int(r * GIB)}
            for a, r in zip(allocated, reserved, strict=True)
        ]
        return {"name": name, "predicted": both[0], "measured": both[1], "stand_in": stand_in}

    failed = {"name": "three", "error": "Traceback\nthe card went up in smoke\n", "stand_in": False}
    maximum = {"name": "one", "budget_bytes": 12 * GIB, "expandable_segments": False, "stand_in": False}
    figures = {"predicted": 90, "true": 100, "predicted_without_retries": 88, "true_without_retries": 99}
    return {
        "dry_run": False,
        "versions": {"torch": "2.13.0"},
        "predicted_for": {"name": "H200"},
        "config": {"minutes": 8},
        "cells": [
            cell("one", (4.04, 4), (8, 8), False),
            cell("two", (0.98, 1), (1.2, 1), False),
            failed,
            cell("tiny", (9, 3), (9, 3), True),
        ],
        "maxima": [{**maximum, **figures}, {**maximum, **figures, "predicted": 1, "stand_in": True}],
        "traces": [],
        "callback": [],
        "tests": {"counts": {"passed": 3, "failed": 1}, "not_passed": {"tests/x.py::test_y": "failed"}, "ended": True},
        "errors": [],
        "not_reached": ["callback: conv net"],
    }
