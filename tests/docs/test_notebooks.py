"""The notebooks for Colab and Kaggle, cell after cell, in a process that has no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
RUN = """
import ast, json, sys
namespace = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
    if last is not None:  # as a notebook shows the value of a cell's last line
        print(repr(eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)))
"""


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Those with code."""
    every = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in every if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    """One for Colab and one for Kaggle, whose first cell of code installs the package, and none has outputs."""
    assert [notebook.stem for notebook in NOTEBOOKS] == ["colab", "kaggle"]
    for notebook in NOTEBOOKS:
        first, *others = cells(notebook)
        assert "".join(first["source"]) == "%pip install -q torch-batchfinder"
        assert not any(cell["outputs"] or cell["execution_count"] for cell in [first, *others])


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(each, marks=[pytest.mark.exhaustive] if each.stem == "kaggle" else []) for each in NOTEBOOKS],
    ids=lambda notebook: notebook.stem,
)
def test_its_cells_run_in_their_order(notebook: Path, tmp_path: Path) -> None:
    """All after the installation; the last finds a batch size in a fit, which reaches the target."""
    _, *others = cells(notebook)
    sources = json.dumps(["".join(cell["source"]) for cell in others])
    environment = os.environ | {"BATCHFINDER_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=sources, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "model: bert-base" in done.stdout
    assert "There is no GPU in this" in done.stdout
    assert "64 64 x 4 = 256" in done.stdout.splitlines()
