"""The tests that docs/cuda-stub.md shows are tests that pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda_build

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys, torch
size = int(sys.argv[2])
while True:
    try:
        torch.empty(size, 4096, device="cuda")
        break
    except torch.OutOfMemoryError:
        size //= 2
        print("the largest batch was halved")
"""


def test_the_pages_tests(tmp_path: Path) -> None:
    """A conftest.py of one line, a function on a T4, and a script that runs out of memory and goes on."""
    conftest, tests = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/cuda-stub.md").read_text(), re.M | re.S)
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_memory.py").write_text(tests)
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert "2 passed" in done.stdout, done.stdout + done.stderr
