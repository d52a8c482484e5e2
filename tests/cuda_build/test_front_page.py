"""The table on the front page, with steps that are recorded by PyTorch's CUDA build."""

from __future__ import annotations

import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cuda_build, pytest.mark.exhaustive, pytest.mark.usefixtures("cuda_stub")]
ROOT = Path(__file__).parents[2]


def sizes(*more: str) -> dict[tuple[str, int], int]:
    """Of the picture's command, by card and length."""
    command = runpy.run_path(str(ROOT / "docs/make_picture.py"))["COMMAND"]
    words = [sys.executable, "-m", *shlex.split(command), *more, "--no-cache", "--json"]
    rows = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["rows"]
    return {(row["gpu"], row["seq_len"]): row["max_batch_size"] for row in rows}


def test_what_differs_is_what_it_says() -> None:
    """One of six, on the T4."""
    said = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "five of the six are the same, and the\nT4 trains 3 samples of 1024 tokens in place of 4." in said
    usual, certified = sizes(), sizes("--recorder", "cuda-build")
    different = {cell: (usual[cell], size) for cell, size in certified.items() if size != usual[cell]}
    assert different == {("T4", 1024): (4, 3)}
