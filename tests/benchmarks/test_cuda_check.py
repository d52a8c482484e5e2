"""`benchmarks/cuda_check.py` without a card: its dry run, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from batchfinder.units import GIB
from benchmarks.cuda.cells import BUDGETS, CELLS, LADDERS
from benchmarks.cuda_check import ROOT, unpack_wheels

SCRIPT = ROOT / "benchmarks" / "cuda_check.py"
WORKSPACE = 8_519_680  # of cuBLAS on an A100; the stand-in on the CPU has none
DRY = "dry run, nothing measured"

pytestmark = pytest.mark.slow


def start(*options: str) -> subprocess.CompletedProcess[str]:
    """The script from another folder, without what an installed package would give it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], Path]:
    """A dry run of the two cells that are small enough for a CPU."""
    folder = tmp_path_factory.mktemp("cuda_check")
    options = ("--dry-run", "--only", "bert-tiny", "--gpu", "a100", "--parts", "maxima,cells,traces")
    out, kept = folder / "result.json", folder / "kept"
    ran = start(*options, "--minutes", "10", "--out", str(out), "--keep", str(kept))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran, json.loads(out.read_text()), kept


def test_it_says_that_nothing_was_measured(done: Any) -> None:
    """In the first line, in the last paragraph and in the file; nothing is among the results, and nothing sums up."""
    ran, result, _ = done
    *_, last, where = ran.stdout.strip().split("\n\n")
    assert ran.stdout.startswith(f"{DRY}; predicted for A100 40GB")
    assert last.startswith(DRY)
    assert where.endswith(f"after {result['seconds']} s")
    assert result["dry_run"] == DRY
    assert result["summary"] == {"cells_measured": 0, "maxima_measured": 0}
    assert not list((ROOT / "benchmarks" / "results").glob("cuda_check*"))


def test_the_file_says_what_it_was_made_with(done: Any) -> None:
    """Hardware, versions, date, command and options; nothing failed and nothing was left out."""
    _, result, _ = done
    assert result["hardware"]["cores"] == os.cpu_count()
    assert (result["hardware"]["gpu"], result["predicted_for"]["name"]) == (None, "A100 40GB")
    assert {"python", "torch", "transformers", "batchfinder"} <= set(result["versions"])
    assert result["command"].startswith("python ")
    assert "--dry-run --only bert-tiny" in result["command"]
    assert len(result["date"]) == 10
    assert result["config"] == {
        "minutes": 10.0,
        "parts": ["cells", "traces", "maxima"],
        "only": "bert-tiny",
        "unset": {},
    }
    assert (result["errors"], result["not_reached"]) == ([], [])


def test_cells_stage_by_stage(done: Any) -> None:
    """After each step the stand-in holds what was predicted but for cuBLAS's two workspaces, to the byte.

    Before the first matrix product it holds what was predicted.
    """
    _, result, _ = done
    assert [row["name"] for row in result["cells"]] == [
        "bert-tiny 8x32 fp32 sgd eager",
        "bert-tiny 8x32 bf16-mixed adamw-fused eager checkpointing",
    ]
    for row in result["cells"]:
        assert row["stand_in"]
        left = {(stage["step"], stage["stage"]): stage["predicted_and_measured"] for stage in row["stages"]}
        for key in ((-1, "model"), (0, "batch")):
            assert left[key]["allocated_bytes"][0] == left[key]["allocated_bytes"][1] > 0
        for key in ((0, "optimizer"), (1, "optimizer")):
            predicted, measured = left[key]["allocated_bytes"]
            assert predicted - measured == 2 * WORKSPACE
        # A stage's peak is its own: where the gradients go, it is what the step before has left.
        assert left[(1, "zero_grad")]["peak_allocated_bytes"] == left[(0, "optimizer")]["allocated_bytes"]
        peaks = [stage["predicted_and_measured"]["peak_allocated_bytes"] for stage in row["stages"]]
        assert row["predicted"]["peak_allocated_bytes"] == max(predicted for predicted, _ in peaks)
        assert row["measured"]["peak_allocated_bytes"] == max(measured for _, measured in peaks)
        assert (row["details"]["verdict"], row["details"]["retries"]) == ("FITS", 0)
        assert row["details"]["before"] == {"allocated_bytes": 0, "reserved_bytes": 0}
    sgd, adamw = result["cells"]
    assert sgd["details"]["optimizer_tensors"] == 0 < adamw["details"]["optimizer_tensors"]


def test_the_true_maximum_is_settled(done: Any) -> None:
    """Real steps under a limit: the answer ran, and so did the three below; the three above ran out of memory."""
    _, result, _ = done
    (row,) = result["maxima"]
    ran = {size: bool(ran) for size, ran, _ in row["tried"]}
    true = row["true"]
    assert row["budget_bytes"] == 24 << 20
    assert row["predicted"] < true  # the stand-in has no workspaces
    assert [ran[size] for size in range(true - 3, true + 4)] == [True] * 4 + [False] * 3
    assert 0 < row["true_without_retries"] <= true


def test_a_history_is_laid_beside_the_recording(done: Any) -> None:
    """The workspaces are too many, masks that a CPU keeps in another type are missed, and the segments are the same."""
    _, result, kept = done
    (row,) = result["traces"]
    assert row["against"] == "cpu"
    assert row["matched"] > 0.9 * row["requests"]["real"]
    assert row["missed"]["count"] == row["requests"]["real"] - row["matched"]
    assert row["too_many"]["count"] == row["requests"]["recorded"] - row["matched"]
    workspaces = [one for one in row["too_many"]["largest"] if one["bytes"] == WORKSPACE]
    assert [(one["stage"], one["times"]) for one in workspaces] == [("forward of step 0", 1), ("backward of step 0", 1)]
    segments = row["allocator"]["segments"]
    assert segments["simulated"] == segments["real"] == segments["equal_from_the_first"] > 0
    assert [path.name for path in kept.iterdir()] == ["bert-tiny-4x32-fp32-sgd-eager.json.gz"]


def test_time_that_is_over(tmp_path: Path) -> None:
    """What was not reached is listed, and the file is there."""
    out = tmp_path / "result.json"
    ran = start("--dry-run", "--parts", "callback,tests", "--minutes", "0.0001", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    expected = ["callback: transformer 32-true", "callback: conv net 32-true", "tests: the tests marked gpu"]
    assert json.loads(out.read_text())["not_reached"] == expected
    assert f"not reached: {', '.join(expected)}" in ran.stdout


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
