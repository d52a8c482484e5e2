"""Public training programs that come with packages, unchanged, take what the benchmark's results say."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from benchmarks import programs

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("cuda_stub")]

RESULTS = programs.ROOT / "benchmarks/results/programs-2-cores.json"
INSTALLED = {name: each for name, each in programs.PROGRAMS.items() if "==" in each["source"] and "torch" not in each}
BY_HAND = ("trl-sft", "trl-dpo", "trl-reward", "open-clip")
"""Programs for which CI has no time."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.exhaustive] if each in BY_HAND else []) for each in INSTALLED],
)
def test_it_takes_what_it_took(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the MiB that its allocator reserves, but for what hangs on how far a reading thread has come."""
    package, _, version = INSTALLED[name]["source"].partition("==")
    folder = str(Path(sys.executable).parents[1] / "programs")  # where CI has them
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    monkeypatch.setenv("PYTHONPATH", folder, prepend=":")
    try:
        assert importlib.metadata.version(package) == version
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: see benchmarks/programs-requirements.txt")
    (took,) = [row for row in json.loads(RESULTS.read_text())["programs"] if row["program"] == name]
    row = programs.run(name, INSTALLED[name], tmp_path, tmp_path, tmp_path / "log")
    assert row["outcome"] == "fits", (tmp_path / "log").read_text()
    assert row["allocated_mib"] == pytest.approx(took["allocated_mib"], rel=0.001)
    assert row["reserved_mib"] == pytest.approx(took["reserved_mib"], rel=0.01)
    assert row["peak"]["phase"] == took["peak"]["phase"]
