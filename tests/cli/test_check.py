"""`check`: what is measured beside what is simulated; marked `gpu`, on a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchfinder.cli.check import as_columns, check_model
from batchfinder.cuda_stub import StubUnavailable, find_build
from batchfinder.devices import Card, device_with_budget
from batchfinder.report.progress import StatusLine
from batchfinder.sizing.sweep_request import Place
from batchfinder.training.spec import StepOptions
from tests.cli.command import HERE, Run


@pytest.mark.parametrize("options", [("--device", "cpu"), ("--device", "cudax"), ("--device", "cuda:7")])
def test_without_a_gpu_it_says_so(run: Run, options: tuple[str, ...]) -> None:
    """Nothing is built, and the way to a simulated figure is named."""
    done = run("check", *options)
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("; `profile` simulates a GPU.\n")
    assert "expected cpu" not in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("options", [("--gpus", "2"), ("--strategy", "ddp")])
def test_several_gpus_are_refused(run: Run, options: tuple[str, str]) -> None:
    """What one process cannot measure."""
    done = run("check", *options)
    assert done.code == 1
    assert done.err.startswith(f"batchfinder: {options[0]}: invalid value ")
    assert "one GPU is checked" in done.err


def test_peaks_stand_side_by_side() -> None:
    """With their difference; a size that did not run has its verdict instead of a peak."""
    fits = {"verdict": "fits", "peak_allocated_bytes": 3 << 30, "peak_reserved_bytes": 4 << 30, "message": ""}
    more = {**fits, "peak_allocated_bytes": 2 << 30}
    failed = {"verdict": "out_of_memory", "peak_allocated_bytes": None, "peak_reserved_bytes": None, "message": "words"}
    sides = [(fits, more), (fits, failed)]
    rows = [
        {"model": "m", "seq_len": 64, "batch_size": 8, "simulated": simulated, "measured": measured}
        for simulated, measured in sides
    ]
    columns = as_columns(rows)
    assert columns["allocated simulated"] == ["3.00 GiB", "3.00 GiB"]
    assert columns["allocated measured"] == ["2.00 GiB", "out of memory"]
    assert columns["allocated off by"] == ["+50.00 %", ""]
    assert columns["reserved off by"] == ["+0.00 %", ""]


@pytest.mark.slow
def test_both_sides_are_of_the_same_steps(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On this machine's CPU, whose peak is the process's: at least the weights; simulated is what `profile` says."""
    monkeypatch.chdir(HERE)
    place = Place("cpu", (Card(device_with_budget(1 << 30), "this CPU"),))
    row, left_out = check_model("mine:tiny", StepOptions(), 1, 8, (16,), place, StatusLine())
    profile = run(
        "profile", "--model", "mine:tiny", "--batch-size", "8", "--seq-len", "16", "--budget", "1GiB", "--json"
    )
    stages = profile.json["stages"]
    for peak in ("allocated", "reserved"):
        simulated = row["simulated"][f"peak_{peak}_bytes"]
        assert simulated == max(stage[f"max_{peak}_bytes"] for stage in stages)
    assert (row["measured"]["verdict"], row["measured"]["peak_allocated_bytes"]) == ("fits", None)
    assert row["measured"]["peak_reserved_bytes"] > 0
    assert {"torch", "transformers"} <= set(row["versions"])
    assert left_out


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recorder", "off"), [pytest.param("fake-device", 0.01, marks=pytest.mark.exhaustive), ("cuda-build", 0)]
)
def test_a_card_is_checked(run: Run, tmp_path: Path, recorder: str, off: float) -> None:
    """Allocated is right to a hundredth, by PyTorch's own CUDA build to the byte; the file is what is printed."""
    if recorder == "cuda-build":
        try:
            find_build()
        except StubUnavailable as error:
            pytest.skip(str(error))
    out = tmp_path / "check.json"
    options = ("--model", "gpt2", "--seq-len", "128", "--batch-size", "4", "--json", "--out", str(out))
    done = run("check", *options, "--recorder", recorder, CUDA_VISIBLE_DEVICES="0")
    (row,) = done.json["rows"]
    sides = [row[side]["peak_allocated_bytes"] for side in ("simulated", "measured")]
    assert sides[0] == pytest.approx(sides[1], rel=off, abs=0)
    assert json.loads(out.read_text()) == done.json
