"""The notebooks for Colab and Kaggle, cell after cell, in a process that has no GPU."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


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
@pytest.mark.exhaustive
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_its_cells_run_in_their_order(notebook: Path, tmp_path: Path) -> None:
    """All after the installation; the last finds a batch size in a fit, which reaches the target."""
    run_cells = runpy.run_path(str(DOCS / "make_gallery.py"))["run_cells"]
    printed = [said for _, said in run_cells(notebook, tmp_path / "cache", tmp_path)]
    assert any("model: bert-base" in said for said in printed)
    assert any("There is no GPU in this" in said for said in printed)
    assert "64 64 x 4 = 256" in printed[-1].splitlines()
