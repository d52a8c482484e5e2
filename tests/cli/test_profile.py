"""`profile`, as a whole process on a small model."""

from __future__ import annotations

import pickle
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz as viz

from batchfinder.units import KIB
from tests.cli.command import Done, Run
from tests.cli.mine import WIDTH

FIGURES = ("allocated_bytes", "max_allocated_bytes", "reserved_bytes", "max_reserved_bytes")
STAGES = ["zero_grad", "forward", "loss", "backward", "optimizer"]
CELL = ("--model", "mine:tiny", "--seq-len", "16", "--gpu", "t4", "--budget", "64MiB")


@pytest.fixture(scope="module")
def swept(run: Run) -> Done:
    """The largest batch in 64 MiB."""
    return run("sweep", *CELL, "--json")


def test_the_largest_batch(run: Run, swept: Done) -> None:
    """A profile of the size a sweep answers with has every stage of both steps, and ends at the sweep's own peak."""
    row = swept.row
    profile = run("profile", *CELL, "--batch-size", str(row["max_batch_size"]), "--json").json
    assert profile.keys() == {"made_by", "recorder", "stages", "oom", "settled", "unmodelled"}
    assert (profile["oom"], profile["settled"]) == (None, True)
    assert [(stage["step"], stage["stage"]) for stage in profile["stages"]] == [
        (step, stage) for step in (0, 1) for stage in STAGES
    ]
    for stage in profile["stages"]:
        assert stage.keys() == {"step", "stage", "micro_batch", *FIGURES}
        assert all(type(stage[figure]) is int for figure in FIGURES)
        assert stage["allocated_bytes"] <= stage["max_allocated_bytes"] <= stage["max_reserved_bytes"]
        assert stage["reserved_bytes"] <= stage["max_reserved_bytes"] <= 64 << 20
    last = profile["stages"][-1]
    peaks = (last["max_allocated_bytes"], last["max_reserved_bytes"])
    assert peaks == (row["peak_allocated_bytes"], row["peak_reserved_bytes"])


def test_one_more_does_not_fit(run: Run, swept: Done) -> None:
    """A profile of one sample more ends with 0 and says where memory ran out, and how much there was."""
    profile = run("profile", *CELL, "--batch-size", str(swept.row["max_batch_size"] + 1), "--json").json
    oom = profile["oom"]
    assert oom.keys() == {"step", "stage", "tried_bytes", "allocated_bytes", "reserved_bytes", "message"}
    assert oom["stage"] in STAGES
    assert oom["allocated_bytes"] <= oom["reserved_bytes"] <= 64 << 20
    assert oom["reserved_bytes"] + oom["tried_bytes"] > 64 << 20
    assert oom["message"].startswith("CUDA out of memory. Tried to allocate ")
    assert "simulated" in oom["message"]
    assert len(profile["stages"]) < 2 * len(STAGES)


def test_table(run: Run) -> None:
    """The table has a line for each stage, of each micro-batch where there are several, and no trailing blanks."""
    command = ("profile", *CELL, "--batch-size", "2", "--accumulation", "2", "--precision", "bf16-mixed")
    done = run(*command)
    explained = [f"left out or assumed: {text}" for text in run(*command, "--json").json["unmodelled"]]
    explained.append("docs/glossary.md explains the words")
    lacking, *others = run(*command, "--explain").out.splitlines()[24:]
    assert lacking.startswith("no bf16 units and no fused attention in bf16: T4; --precision 16-mixed")
    assert others == explained
    assert (done.code, done.err) == (0, "building mine:tiny\nrecording mine:tiny\n")
    lines = done.out.splitlines()
    assert lines[:5] == [
        "mine:tiny at batch size 2, sequence length 16 on T4, 64.00 MiB budget, simulated",
        "bf16-mixed, adamw",
        "64.00 MiB usable",
        f"recorder: fake device, PyTorch {torch.__version__}",
        "",
    ]
    assert lines[5].split("  ")[:3] == ["step", "micro-batch", "stage"]
    assert lines[5].endswith("  max reserved")
    assert [line.split()[:-8] for line in lines[7:23]] == [
        words
        for step in "01"
        for words in (
            [step, "zero_grad"],
            *([step, micro_batch, stage] for micro_batch in "01" for stage in ("forward", "loss", "backward")),
            [step, "optimizer"],
        )
    ]
    assert lines[23] == ""
    assert len(explained) == 2
    assert lines[24:] == [lacking, "1 assumption; --explain says which"]
    assert [line for line in lines if line != line.rstrip()] == []


def test_out_of_memory_is_told_below_the_table(run: Run) -> None:
    """Where memory ran out, PyTorch's message stands below the stages that ran, and the command ends with 0."""
    done = run("profile", "--model", "mine:shapeless", "--budget", "4MiB", "--mode", "inference")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "mine:shapeless at batch size 8 on 4.00 MiB budget, simulated"
    assert lines[1] == "fp32, inference"
    (said,) = [line for line in lines if line.startswith("out of memory in ")]
    assert ": CUDA out of memory. Tried to allocate " in said


def test_snapshot(run: Run, tmp_path: Path) -> None:
    """PyTorch's reader takes the file; it ends with the profile's figures, less the batch, which has gone by then."""
    file = tmp_path / "step.pickle"
    profile = run("profile", *CELL, "--batch-size", "3", "--json", "--snapshot", str(file)).json
    snapshot = pickle.loads(file.read_bytes())
    last = profile["stages"][-1]
    assert f"total_reserved: {viz.Bytes(last['reserved_bytes'])}\n" in viz.segsum(snapshot)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == last["reserved_bytes"]
    batch = 4 * 3 * 16 * WIDTH
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == last["allocated_bytes"] - batch
    events = snapshot["device_traces"][0]
    signs = {"alloc": 1, "free_completed": -1}
    most = max(accumulate(signs.get(event["action"], 0) * event["size"] for event in events))
    assert 0 <= last["max_allocated_bytes"] - most < 64 * KIB  # what blocks are larger than asked for
    frames = [tuple(f"{frame['filename']}:{frame['name']}" for frame in event["frames"]) for event in events]
    assert frames[0] == (
        "first:aten.empty_strided.default",
        "parameter:float32[1024, 256]",
        "before the first step:model",
    )
    assert {said[-1] for said in frames} >= {f"step {step}:{stage}" for step in (0, 1) for stage in STAGES[1:]}
