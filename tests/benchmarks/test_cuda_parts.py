"""The smaller parts of the check: the far end, the callback's comparison, the gpu tests, wheels, and the summary."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cuda_parts import callback_check
from benchmarks.cuda_parts.cells import BUDGETS, CELLS, LADDERS
from benchmarks.cuda_parts.far_end import Failed, FarEnd
from benchmarks.cuda_parts.part_callback import STAND_IN_CASES
from benchmarks.cuda_parts.part_tests import marked_files, read_results
from benchmarks.cuda_parts.report import has_failed, report, summary
from benchmarks.cuda_parts.wheels import unpack_wheels

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def test_what_is_measured() -> None:
    """At least 24 cells of 6 models, and each of the choices that change the memory; four budgets."""
    assert len(CELLS) == len({cell.name for cell in CELLS}) >= 24
    assert len({cell.model for cell in CELLS}) == 6
    assert {cell.precision for cell in CELLS} >= {"fp32", "bf16-mixed", "16-mixed"}
    assert {cell.optimizer for cell in CELLS} >= {"adamw", "adamw-fused", "sgd"}
    assert {cell.attention for cell in CELLS} == {"eager", "sdpa", None}
    assert {cell.checkpointing for cell in CELLS} == {False, True}
    assert [round(budget / GIB, 2) for budget in BUDGETS] == [11.17, 12, 16, 24]
    assert all(ladder.budgets == BUDGETS for ladder in LADDERS)


def test_a_far_end_that_fails_is_replaced() -> None:
    """One that hangs, dies or says that the card is dead costs its own answer, and says why; the next one is right."""
    with FarEnd("cuda:3", module="tests.benchmarks.slow_far_end") as far:
        with pytest.raises(Failed, match=r"^no answer within 1 s, ended for that$"):
            far.ask({"wait": True}, 1)
        with pytest.raises(Failed, match=r"^the process ended with 7: about to die$"):
            far.ask({"die": True}, 60)
        with pytest.raises(Failed, match=r"^it failed$"):
            far.ask({"fail": True}, 60)
        assert far._child is None
        assert far.ask({}, 60) == {"device": "cuda:3"}


def test_the_callback_is_compared_with_a_plain_run() -> None:
    """On a CPU: the size is the cap, training is the same bit for bit, and the second start tries nothing."""
    (case,) = [case for case in STAND_IN_CASES if case["net"] == "transformer"]
    found = callback_check.compare(**case)
    assert (found["batch_size"], found["stopped_by"], found["out_of_memory"]) == (8, "CAP", 0)
    assert found["probes"] == len(found["tried"]) >= 1
    assert found["losses_equal"] is found["weights_equal"] is True
    assert (found["second_start"]["batch_size"], found["second_start"]["probes"]) == (8, 0)


def test_other_weights_are_told() -> None:
    """A single bit makes two modules differ."""
    one, other = (callback_check.ConvNet(2, rows=4, side=4, width=2) for _ in range(2))
    assert not callback_check._same(one, other)
    other.load_state_dict(one.state_dict())
    assert callback_check._same(one, other)
    with torch.no_grad():
        last = list(other.parameters())[-1]
        last[0] = torch.nextafter(last[0], torch.tensor(9.0))
    assert not callback_check._same(one, other)


def test_files_with_gpu_tests() -> None:
    """Those that have the mark, and no others."""
    files = marked_files(ROOT)
    assert {"tests/measure/test_cuda.py", "tests/lightning/test_gpu.py", "tests/loop/test_tune.py"} <= set(files)
    assert "tests/test_units.py" not in files


def test_pytests_words_are_read() -> None:
    """Each test's result by name; the output's end is kept where something did not pass, or nothing ran."""
    text = (
        "tests/a/test_b.py::test_c[x-1] PASSED [ 33%]\n"
        "tests/a/test_b.py::test_d FAILED [ 66%]\n"
        "tests/a/test_b.py::test_e SKIPPED (needs a CUDA device) [100%]\n"
        "FAILED tests/a/test_b.py::test_d - assert 1 == 2\n"
    )
    assert read_results(text) == {
        "counts": {"failed": 1, "passed": 1, "skipped": 1},
        "not_passed": {"tests/a/test_b.py::test_d": "failed"},
        "end_of_output": text,
    }
    assert read_results("tests/a.py::b PASSED\n") == {"counts": {"passed": 1}, "not_passed": {}, "end_of_output": ""}
    assert read_results("ImportError")["end_of_output"] == "ImportError"


def test_wheels_are_used_where_they_are_needed(tmp_path: Path) -> None:
    """A package that is not installed is importable from its wheel; one that is stays as it is."""
    wheels, target = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name, content in (("not_installed_here", "number = 7\n"), ("pytest", "raise ValueError\n")):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/__init__.py", content)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", "")
    assert unpack_wheels(wheels, target) == ["not_installed_here-1.0-py3-none-any.whl"]
    code = "import not_installed_here; print(not_installed_here.number)"
    done = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(target)}, capture_output=True)
    assert done.stdout == b"7\n", done.stderr
    assert not (target / "pytest").exists()


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
