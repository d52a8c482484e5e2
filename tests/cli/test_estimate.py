"""`estimate`, as a whole process on a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchfinder.devices import find_gpu
from batchfinder.training.strategies import BUCKET_ELEMENTS
from batchfinder.units import MIB
from tests.cli.command import Done, Run

KINDS = (
    *("parameters", "gradients", "optimizer", "activations", "temporary", "inputs", "workspace"),
    *("fragmentation", "context"),
)
MODEL = ("--model", "mine:tiny", "--seq-len", "16", "--gpu", "t4")
CELL = (*MODEL, "--budget", "64MiB")
CONTEXT = find_gpu("t4").context_bytes


@pytest.fixture(scope="module")
def row(run: Run) -> dict[str, Any]:
    """The sweep's row: the largest batch in 64 MiB."""
    return run("sweep", *CELL, "--json").row


@pytest.fixture(scope="module")
def found(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    """The estimate of that batch, on four GPUs."""
    return run("estimate", *CELL, "--batch-size", str(row["max_batch_size"]), "--num-gpus", "4", "--json").json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tables are written to."""
    return tmp_path_factory.mktemp("estimate")


@pytest.fixture(scope="module")
def beyond(run: Run, row: dict[str, Any], folder: Path) -> Done:
    """One sample more, as tables, in the terminal and in a file."""
    size = str(row["max_batch_size"] + 1)
    more = ("--by", "module", "--advice", "--markdown", str(folder / "found.md"))
    return run("estimate", *CELL, "--batch-size", size, *more)


def test_as_the_sweep_has_it(row: dict[str, Any], found: dict[str, Any]) -> None:
    """The largest batch of a sweep fits, with the sweep's own peaks, and the kinds sum to the peak exactly."""
    assert found["fits"] is True
    assert found["peak_bytes"] == row["peak_reserved_bytes"] + CONTEXT
    assert found["reserved_bytes"] == row["peak_reserved_bytes"]
    assert found["allocated_bytes"] == row["peak_allocated_bytes"]
    assert found["capacity_bytes"] == 64 * MIB + CONTEXT
    assert sum(found[f"{kind}_bytes"] for kind in KINDS) == found["peak_bytes"]
    assert all(type(found[f"{kind}_bytes"]) is int for kind in KINDS)
    assert found["parameters_bytes"] == 4 * (2 * 256 * 1024 + 1024 + 256)
    assert found["optimizer_bytes"] == 2 * found["parameters_bytes"]


def test_as_the_profile_has_it(run: Run, row: dict[str, Any], found: dict[str, Any]) -> None:
    """Its peak is profile's, too."""
    profile = run("profile", *CELL, "--batch-size", str(row["max_batch_size"]), "--json").json
    assert profile["stages"][-1]["max_reserved_bytes"] + CONTEXT == found["peak_bytes"]


@pytest.mark.parametrize(("less", "runs"), [(0, True), (2 * MIB, False)])
def test_the_smallest_card(run: Run, row: dict[str, Any], found: dict[str, Any], less: int, runs: bool) -> None:
    """The batch runs on a card of required_bytes, and on one of 2 MiB less it does not."""
    budget = found["required_bytes"] - CONTEXT - less
    size = str(row["max_batch_size"])
    profile = run("profile", *MODEL, "--budget", str(budget), "--batch-size", size, "--json").json
    assert (profile["oom"] is None and profile["settled"]) == runs


def test_the_moment_and_the_tensors(found: dict[str, Any]) -> None:
    """The peak has a step, a stage, a module and an operator, and the tensors alive then are named."""
    peak = found["peak"]
    assert peak.keys() == {"step", "stage", "micro_batch", "module", "operator", "requested_bytes", "shape"}
    assert (peak["step"], peak["stage"]) == (1, "backward")
    assert peak["operator"].startswith("aten.")
    assert found["last_segment"].keys() == peak.keys()
    largest = found["largest"]
    assert len(largest) == 10
    assert largest == sorted(largest, key=lambda tensor: -tensor["bytes"])
    assert {tensor["module"] for tensor in largest} <= {"", "first", "second"}
    assert found["modules"]["bytes"] == sum(found[f"{kind}_bytes"] for kind in KINDS[:-2])
    assert [module["module"] for module in found["modules"]["modules"]] == ["first", "second"]


def test_several_gpus(found: dict[str, Any]) -> None:
    """Each strategy has the same figures for one of the GPUs, which sum to its peak."""
    strategies = found["strategies"]
    assert [one["strategy"] for one in strategies] == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP"]
    for one in strategies:
        assert sum(one[f"{kind}_bytes"] for kind in (*KINDS, "communication")) == one["peak_bytes"]
    # At the peak the first step's bucket is there beside those that replace it.
    assert strategies[0]["communication_bytes"] == 2 * found["parameters_bytes"]
    assert found["optimizer_bytes"] / 4 <= strategies[1]["optimizer_bytes"] < found["optimizer_bytes"]
    assert strategies[2]["peak_bytes"] > 4 * BUCKET_ELEMENTS  # DeepSpeed's bucket is as large for a tiny model
    assert strategies[3]["parameters_bytes"] == pytest.approx(found["parameters_bytes"] / 4, abs=16)
    assert strategies[0]["peak_bytes"] >= found["peak_bytes"] + 2 * found["parameters_bytes"]  # the buckets


def test_no_advice_where_it_fits(found: dict[str, Any]) -> None:
    """Changes are tried where it does not fit, or when asked for."""
    assert found["advice"] is None
    assert found["oom"] is None


def test_tables(row: dict[str, Any], beyond: Done) -> None:
    """One sample more does not fit: the tables say by how much, what is alive, where, and what would make it fit."""
    assert beyond.code == 0
    lines = beyond.out.splitlines()
    size = row["max_batch_size"] + 1
    assert lines[0] == f"mine:tiny at batch size {size}, sequence length 16 on T4, 64.00 MiB budget, simulated"
    assert lines[1] == "fp32, adamw"
    assert lines[2].startswith("does not fit: ")
    assert " short; it would take " in lines[2]
    assert [line.rsplit("  ", 2)[0].split("  ")[0] for line in lines[7:17]] == [
        *("parameters", "gradients", "optimizer state", "activations", "temporary buffers", "inputs"),
        *("cuBLAS workspaces", "fragmentation", "CUDA context", "all"),
    ]
    assert lines[3].startswith("recorder: fake device, PyTorch ")
    assert lines[18] == "it does not fit, so all figures are for a GPU with unlimited memory"
    titles = [line for line, before in zip(lines[1:], lines, strict=False) if before == "" and line[:1].isupper()]
    assert titles == [
        "The 10 largest tensors at the peak",
        "By module, at the peak",
        "Other options on one GPU",
        f"What trains {size} samples at a time on T4, 64.00 MiB budget",
    ]
    assert [line for line in lines if line != line.rstrip()] == []
    start = lines.index("By module, at the peak") + 4
    assert [line.split()[0] for line in lines[start : start + 3]] == ["all", "first", "second"]


def test_advice(row: dict[str, Any], beyond: Done) -> None:
    """Each change has what the batch takes with it, whether it fits, and the largest batch: without one the sweep's."""
    lines = beyond.out.splitlines()
    start = lines.index("Other options on one GPU") + 4
    table = {line[:50].split("  ")[0]: line.split("  ")[1:] for line in lines[start : lines.index("", start)]}
    cells = {change: [cell.strip() for cell in row if cell.strip()] for change, row in table.items()}
    most = row["max_batch_size"]
    assert cells["none"][1:] == ["no", str(most)]
    accumulated = next(change for change in cells if change.startswith("--batch-size"))
    micro, times = (int(word) for word in accumulated.split() if word.isdecimal())
    assert most + 1 <= micro * times < most + 1 + times
    assert micro <= most
    assert f"{accumulated}: an effective batch of {micro * times}" in lines
    assert cells[accumulated][1] == "yes"
    assert cells["--precision 16-mixed"][1] == "yes"
    assert int(cells["--precision 16-mixed"][2]) > most
    assert int(cells["--optimizer sgd"][2]) >= most
    assert cells["--gradient-checkpointing"] == ["-", "-", "-"]
    (said,) = [line for line in lines if line.startswith("--gradient-checkpointing: ")]
    assert "mine:tiny enables it in its model (Tiny) itself" in said


def test_what_trains(row: dict[str, Any], beyond: Done) -> None:
    """Where a size does not fit, the first of what does is its micro-batches with accumulation, as asked for."""
    lines = beyond.out.splitlines()
    size = row["max_batch_size"] + 1
    start = next(number for number, line in enumerate(lines) if line.startswith(f"What trains {size} samples"))
    first = next(line for line in lines[start:] if re.search(r"\d+ x \d+ = ", line))
    micro, times = re.search(r"(\d+) x (\d+) = ", first).groups()  # type: ignore[union-attr]
    assert first.startswith("as asked for ")
    assert int(micro) <= row["max_batch_size"]
    assert abs(int(micro) * int(times) - size) <= size / 20  # as `plan_accumulation` has it


def test_markdown(beyond: Done, folder: Path) -> None:
    """The file has the same tables."""
    text = (folder / "found.md").read_text(encoding="utf-8")
    assert text.count("| --- |") + text.count("| ---: |") > 3
    for title in ("The 10 largest tensors at the peak", "By module, at the peak", "Other options on one GPU"):
        assert f"**{title}" in text
    assert "| fragmentation |" in text


def test_progress_is_on_stderr(beyond: Done) -> None:
    """What is being done is said on stderr, the changes tried included."""
    lines = beyond.err.splitlines()
    assert lines[:3] == ["building mine:tiny", "recording mine:tiny", "trying --accumulation"]
    assert "trying --optimizer sgd" in lines
    assert all(line.startswith(("trying ", "recording ", "finding a micro-batch ")) for line in lines[2:])


def test_beyond_the_model(run: Run) -> None:
    """A length that the model does not allow is refused."""
    done = run("estimate", "--model", "mine:tiny", "--seq-len", "97")
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith(
        "batchfinder: --seq-len: invalid value 97; expected at most 96 tokens, the most that mine:tiny allows.\n"
    )
