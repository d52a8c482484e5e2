"""`--html` and `page`: what is in the file is what the command found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cli.main import main
from batchfinder.cli.page import name_of
from tests.cli.command import Run

CELL = ("--model", "mine:tiny", "--gpu", "t4", "--budget", "256MiB")


def figures(file: Path) -> dict[str, Any]:
    """The figures in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text("utf-8"), re.DOTALL)
    assert found is not None
    read: dict[str, Any] = json.loads(found.group(1))
    return read


@pytest.mark.parametrize("verb", ["sweep", "profile", "estimate", "plan", "page"])
def test_another_file_is_refused_before_any_work(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no page by its name is not written, and it is said what the name must be."""
    file = tmp_path / "page.txt"
    given = [str(file)] if verb == "page" else [*CELL, "--html", str(file)]
    given += ["--cache", str(tmp_path / "cache")] if verb in ("sweep", "page") else []
    given += ["--target-batch-size", "8"] if verb == "plan" else []
    assert main([verb, *given]) == 1
    assert "ends in .html" in " ".join(capsys.readouterr().err.split())
    assert not file.exists()


@pytest.mark.slow
def test_a_sweep_and_its_cache(run: Run, tmp_path: Path) -> None:
    """A page has the table's rows, the memory at each answer and what changes buy; the cache's page has the rows."""
    cache, file = tmp_path / "cache", tmp_path / "sweep.html"
    lengths = ("--seq-len", "16", "--seq-len", "32")
    rows = run("sweep", *CELL, *lengths, "--json", "--html", str(file), cache=cache).json["rows"]
    cells = figures(file)["cells"]
    kept = [(row["model"], row["seq_len"], row["max_batch_size"], row["peak_reserved_bytes"]) for row in rows]
    assert [(c["model"], c["seq_len"], c["batch_size"], c["peak_bytes"]) for c in cells] == kept
    for cell in cells:
        held = [sum(each) for each in zip(*cell["timeline"]["by_kind"].values(), strict=True)]
        assert 0.8 * cell["peak_bytes"] < max(held) * cell["timeline"]["unit"] <= cell["peak_bytes"]
        first, *others = cell["changes"]
        assert (first["change"], first["max_batch_size"]) == ("", cell["batch_size"])
        sizes = {each["change"]: each["max_batch_size"] for each in others}
        assert sizes["--precision 16-mixed"] > cell["batch_size"]
    assert run("page", str(tmp_path / "all.html"), "--json", cache=cache).json["results"] == 2
    cached = figures(tmp_path / "all.html")["cells"]
    assert [(c["model"], c["seq_len"], c["batch_size"], c["peak_bytes"]) for c in cached] == kept
    assert {cell["technique"] for cell in cached} == {"fp32, adamw"}


def test_a_model_has_one_name() -> None:
    """Where its repository was named it is called as the catalogue calls it; others are as they were named."""
    assert name_of("meta-llama/Llama-3.1-8B") == name_of("llama-3.1-8b") == "llama-3.1-8b"
    assert name_of("mine:tiny") == "mine:tiny"
    assert name_of("") == ""


def test_an_empty_cache(run: Run, tmp_path: Path) -> None:
    """There is no page of nothing."""
    assert "is empty" in run("page", str(tmp_path / "all.html")).out
    assert not (tmp_path / "all.html").exists()


@pytest.mark.slow
def test_one_size(run: Run, tmp_path: Path) -> None:
    """`profile` shows its memory, `estimate` also kinds and changes, `plan` its options."""
    file, one = tmp_path / "page.html", (*CELL, "--seq-len", "16")
    assert run("profile", *one, "--batch-size", "4", "--html", str(file)).code == 0
    (cell,) = figures(file)["cells"]
    assert cell["timeline"]["marks"][0][2] == "model"
    estimated = run("estimate", *one, "--batch-size", "4", "--json", "--html", str(file)).json
    (cell,) = figures(file)["cells"]
    assert cell["kinds"]["parameters"] == estimated["parameters_bytes"]
    assert [each["change"] for each in cell["changes"]] == [each["change"] for each in estimated["advice"]]
    planned = run("plan", *one, "--target-batch-size", "8", "--json", "--html", str(file)).json
    (cell,) = figures(file)["cells"]
    assert [each["peak_bytes"] for each in cell["changes"]] == [fit["peak_bytes"] for fit in planned["fits"]]
    assert cell["batch_size"] == planned["micro_batch_size"]
