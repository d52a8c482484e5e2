"""Temporary copies of a folder: nothing that is written in one reaches the original."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.programs import scratch
from batchfinder.programs.scratch import scratch_copy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project beside its data, with a repository, an environment and a pipe in it."""
    project = tmp_path / "work/project"
    (project / "src/__pycache__").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / ".venv/bin").mkdir(parents=True)
    (project / "src/train.py").write_text("print('original')")
    (project / "weights.pt").write_bytes(bytes(1 << 20))
    (project / "latest.pt").symlink_to("weights.pt")
    (project / "whole.pt").symlink_to(project / "weights.pt")
    (project / "lost").symlink_to("nowhere")
    os.mkfifo(project / "pipe")
    (tmp_path / "work/data").mkdir()
    (tmp_path / "work/data/rows.txt").write_text("rows")
    return project


def test_what_is_written_stays_in_the_copy(folder: Path) -> None:
    """Files written anew, appended to and removed, through links as well."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with scratch_copy(folder) as copy:
        assert (copy / "src/train.py").read_text() == "print('original')"
        (copy / "src/train.py").write_text("changed")
        with (copy / "weights.pt").open("ab") as file:
            file.write(b"more")
        (copy / "latest.pt").write_bytes(b"through the link")
        (copy / "whole.pt").write_bytes(b"and through one that has the whole path")
        (copy / "out").mkdir()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not copy.exists()
    assert (folder / ".git").is_dir()
    assert (folder / ".venv/bin").is_dir()


def test_what_lies_beside_it_is_found(folder: Path) -> None:
    """As `../data`; the repository and the environment are linked."""
    with scratch_copy(folder) as copy:
        assert (copy / "../data/rows.txt").read_text() == "rows"
        assert (copy / ".git").is_symlink()
        assert (copy / ".venv").is_symlink()
        assert not (copy / "pipe").exists()


def test_too_much_to_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest files are named."""
    monkeypatch.setattr(scratch, "MOST_BYTES", 1 << 19)
    with pytest.raises(InvalidValue, match=r"weights\.pt \(1\.00 MiB\)"), scratch_copy(folder):
        pass


def test_a_copy_that_fails(folder: Path) -> None:
    """The file is named, and what to do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))  # as on a disk without room
    try:
        with pytest.raises(InvalidValue, match=r"weights\.pt \(.*File too large.*--here"), scratch_copy(folder):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
