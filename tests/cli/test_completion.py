"""What a shell is told that completes a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("batchfinder swe", ["sweep "]),
        ("batchfinder sweep --grad", ["--gradient-checkpointing "]),
        ("batchfinder zz", []),
    ],
)
def test_commands_and_options_are_completed(typed: str, completions: list[str], tmp_path: Path) -> None:
    """As `register-python-argcomplete batchfinder` has a shell ask for them."""
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    asked |= {"COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    done = subprocess.run([sys.executable, "-m", "batchfinder"], env=os.environ | asked, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")
    assert answer.read_text().split("\n") == (completions or [""])
