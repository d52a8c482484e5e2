"""Sweeps that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Done, Run, run_command, run_here
from tests.prefork import Prefork

SMALL = (
    *("sweep", "--model", "mine:tiny", "--seq-len", "16", "--seq-len", "32", "--gpu", "t4"),
    *("--instance", "ml.p3.16xlarge", "--budget", "1GiB", "--headroom", "10%", "--target-batch-size", "100000"),
)


@pytest.fixture(autouse=True)
def _no_card_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for without a device is simulated, whatever the machine has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def run(prefork: Prefork, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(*arguments, cache=..., **environment)` runs the command, with an empty cache where none is given."""

    def run_to_the_end(*arguments: str, cache: Path | None = None, **more: str) -> Done:
        return run_here(prefork, *arguments, cache=cache or tmp_path_factory.mktemp("cache"), **more)

    return run_to_the_end


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small sweep keeps its cache and its files."""
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="session")
def small_json(small_folder: Path) -> Done:
    """The small sweep, as JSON, with an empty cache, and as a process of its own."""
    return run_command(*SMALL, "--json", "--csv", str(small_folder / "sweep.csv"), cache=small_folder / "cache")


@pytest.fixture(scope="session")
def small_table(run: Run, small_folder: Path, small_json: Done) -> Done:
    """The small sweep again, as a table."""
    return run(*SMALL, "--markdown", str(small_folder / "sweep.md"), cache=small_folder / "cache")
