"""Packages that lie beside this environment, since torchvision would be there for transformers too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = os.environ.get("BATCHFINDER_TEST_PROGRAMS") or str(Path(sys.executable).parents[1] / "programs")
"""Where CI has those of benchmarks/programs-requirements.txt."""


def with_package(package: str) -> dict[str, str]:
    """The environment of a process that finds a package; the test is skipped where it is not there."""
    if not (Path(FOLDER) / package).is_dir():
        pytest.skip(f"{package} is not in {FOLDER}: see benchmarks/programs-requirements.txt")
    paths = [str(Path(__file__).parents[2]), FOLDER]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


_ANSWERS = """
import json, sys
from batchfinder.errors import BatchFinderError

answers = []
for spec, sides, options in json.loads(sys.argv[1]):
    try:
        answers.append(ask(spec, sides, **options))
    except BatchFinderError as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


def answers(package: str, ask: str, *questions: tuple[str, list[int | None], dict[str, Any]]) -> list[Any]:
    """What a function says of models, in one process that finds a package, or the error that it raised, in words.

    Args:
        ask: the source of `ask(spec, sides, **options)`, which returns JSON values.
        questions: its arguments.
    """
    command = [sys.executable, "-c", ask + _ANSWERS, json.dumps(questions)]
    done = subprocess.run(command, capture_output=True, text=True, env=with_package(package))
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found
