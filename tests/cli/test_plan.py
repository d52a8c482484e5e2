"""Tests of batchfinder/cli/plan.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cli.main import main
from batchfinder.devices import find_gpu

pytestmark = pytest.mark.usefixtures("forked_recorders")

MODELS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "vocab_size": 4000,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 1024,
    },
}


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main(["plan", *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The least change that trains, a runner-up, and what the options asked for take; as a table and as JSON."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["llama"]))
    where = ("--model", str(file), "--seq-len", "1024", "--gpu", "a100 40gb", "--target-batch-size", "4")
    where += ("--budget", "45MiB", "--keep", "precision", "--keep", "optimizer")
    page = tmp_path / "plan.md"
    found = planned(capsys, *where, "--markdown", str(page))
    assert found["trains"]
    least = found["fits"][0]
    assert least["change"].endswith("--loss chunked")
    assert (least["precision"], least["optimizer"], least["trains_adapters"]) == ("fp32", "adamw", False)
    assert found["micro_batch_size"] * found["accumulation"] == found["effective_batch_size"] == 4
    assert least["peak_bytes"] < found["sample_bytes"]
    written = page.read_text()
    title, details, has, recorder, heading, _, asked, first, *_ = [line for line in written.splitlines() if line]
    assert title == f"**Plan for 4 samples of {file} at 1024 on A100 40GB, 45.00 MiB budget, simulated**"
    assert details == "fp32, adamw"
    assert "of which the CUDA context takes" in has
    assert recorder == f"recorder: fake device, PyTorch {found['recorder_version']}"
    assert heading == "| change | micro-batch x accumulation | peak | FLOPs | what trains |"
    assert asked.startswith("| as asked for | 1 does not fit | ")
    assert first.startswith(f"| {least['change']} | ")
    assert f"the least change that trains is {least['change']}: micro-batch x accumulation" in written
    assert "GPUs with the memory that it takes as asked for: " in written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--target-batch-size: missing; expected a number: how many samples an optimizer step is to see"),
        (
            ("--target-batch-size", "8", "--allow", "magic"),
            "--allow: invalid value 'magic'; expected one of lora, qlora",
        ),
        (("--target-batch-size", "8", "--optimizer-in-backward"), "expected a plan without it: no gradients are left"),
        (("--target-batch-size", "8", "--gpu", "t4", "--instance", "p3.2xlarge"), "either a --gpu or an --instance"),
        (("--target-batch-size", "8", "--mode", "inference"), "expected train: a plan is for training"),
        (
            ("--target-batch-size", "8", "--gpu", "t4", "--min-micro-batch", "9"),
            "--min-micro-batch: invalid value 9; expected from 1 to 8, a GPU's share of the target of 8",
        ),
        (("--target-batch-size", "8", "--gpu", "t4", "--min-micro-batch", "0"), "--min-micro-batch: invalid value '0'"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str) -> None:
    """With what was expected, before anything is recorded."""
    assert main(["plan", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_sweep_says_what_trains_where_nothing_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first change of a plan for the same, for two rows of a model at most."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["llama"]))
    where = ("--model", str(file), "--seq-len", "1024", "--gpu", "a100 40gb", "--budget", "60MiB", "--no-cache")
    assert main(["sweep", *where, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["max_batch_size"] == 0
    assert [fit["change"] for fit in row["what_fits"]["fits"]] == ["--loss chunked"]
    assert row["what_fits"]["fits"][0]["peak_bytes"] <= (60 << 20) + find_gpu("a100 40gb").context_bytes
