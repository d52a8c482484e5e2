"""Packages that lie beside this environment, since torchvision would be there for transformers too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("BATCHFINDER_TEST_PROGRAMS") or str(Path(sys.executable).parents[1] / "programs")
"""Where CI has those of benchmarks/programs-requirements.txt."""


def with_package(package: str) -> dict[str, str]:
    """The environment of a process that finds a package; the test is skipped where it is not there."""
    if not (Path(FOLDER) / package).is_dir():
        pytest.skip(f"{package} is not in {FOLDER}: see benchmarks/programs-requirements.txt")
    paths = [str(Path(__file__).parents[2]), FOLDER]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
