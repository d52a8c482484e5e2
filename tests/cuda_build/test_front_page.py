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


def test_all_are_the_same_as_it_says() -> None:
    """Three cards and two lengths: the fake device and the CUDA build agree."""
    assert "all six are the same" in (ROOT / "README.md").read_text(encoding="utf-8")
    usual, certified = sizes(), sizes("--recorder", "cuda-build")
    assert len(usual) == 6
    assert certified == usual
