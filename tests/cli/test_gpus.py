"""`gpus`, `--version`, and a model named without an option."""

from __future__ import annotations

from importlib.metadata import version

import pytest

import batchfinder
from batchfinder.cli.main import main
from batchfinder.devices import all_gpus
from tests.cli.command import Done, Run


def names(done: Done) -> set[str]:
    """Of the GPUs that were listed."""
    return {each["name"] for each in done.json}  # type: ignore[index]


def test_the_gpus_that_can_be_named(run: Run) -> None:
    """All of them, those of a size, and those that can do something."""
    listed = run("gpus", "--json")
    assert names(listed) == {gpu.name for gpu in all_gpus()}
    some = names(run("gpus", "--json", "--min", "24GB", "--has", "bf16"))
    assert {"RTX 4090", "RTX 3090", "MI300X", "A100 40GB"} <= some
    assert not {"T4", "V100 32GB", "RTX 3080", "K80"} & some
    assert "A100 40GB" not in names(run("gpus", "--json", "--has", "fp8"))
    table = run("gpus", "--min", "24GB")
    assert table.code == 0
    assert "RTX 4090" in table.out
    wrong = run("gpus", "--has", "fp4")
    assert (wrong.code, "one of bf16, fp8" in wrong.err) == (1, True)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The package's, and PyTorch's."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"batchfinder {batchfinder.__version__}",
        f"torch {version('torch')}",
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_model_without_its_option(run: Run) -> None:
    """As by --model, and beside it in a sweep."""
    options = ("--batch-size", "4", "--seq-len", "64", "--gpu", "t4", "--json")
    bare, named = run("estimate", "gpt2", *options), run("estimate", "--model", "gpt2", *options)
    assert bare.code == 0, bare.err
    assert {**bare.json, "made_by": None} == {**named.json, "made_by": None}
    swept = run("sweep", "gpt2", "--model", "bert-base", "--seq-len", "64", "--gpu", "t4", "--json")
    assert [row["model"] for row in swept.json["rows"]] == ["gpt2", "bert-base"]
