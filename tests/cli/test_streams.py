"""Standard streams that are closed, full or that nobody reads: no traceback, and no success with part of the output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from tests.cli.command import COMMAND, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")

SCRIPT = """
import sys
from batchfinder.cli import profile
from batchfinder.__main__ import run
def work(arguments):
    print("at work", file=sys.stderr)
    {work}
    return 0
profile.main = work
sys.argv = ["batchfinder", "profile"]
sys.exit(run())
"""
FULL = "batchfinder: the output could not be printed: No space left on device.\n"


def run(
    folder: Path,
    *arguments: str,
    work: str | None = None,
    stdout: int | IO[str] = subprocess.PIPE,
    stderr: int | IO[str] = subprocess.PIPE,
    before: Callable[[], None] | None = None,
) -> tuple[int, str | None, str | None]:
    """Exit code, stdout and stderr of a command, or of one that does `work`."""
    command = [*COMMAND, *arguments] if work is None else [sys.executable, "-c", SCRIPT.format(work=work)]
    done = subprocess.run(
        command,
        stdout=stdout,
        stderr=stderr,
        stdin=subprocess.DEVNULL,
        text=True,
        preexec_fn=before,
        cwd=folder,
        env=environment(folder / "cache", PYTHONPATH=str(Path(__file__).parents[2]), PYTHONUNBUFFERED=""),
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [("cache", "list"), ("cache", "list", "--json"), ("sweep", "--json")])
def test_a_full_disk_is_noticed_before_the_work(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Of stdout: exit code 1, the system's words, and nothing was built."""
    with open("/dev/full", "w") as full:
        assert run(tmp_path, *arguments, stdout=full) == (1, None, FULL)


def test_a_disk_that_is_full_later(tmp_path: Path) -> None:
    """What fails only as it is printed ends with 1 and the same words, not with an internal error."""
    work = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('{' * 100)"
    assert run(tmp_path, work=work) == (1, "", f"at work\n{FULL}")
    assert run(tmp_path, work=work.replace("100", "10**6")) == (1, "", f"at work\n{FULL}")


def test_stdout_that_is_closed(tmp_path: Path) -> None:
    """Nothing is done, since nothing could be printed; the cache's own files do not become stdout."""
    code, _, said = run(tmp_path, "cache", "list", before=lambda: os.close(1))
    assert (code, said) == (1, "batchfinder: the output could not be printed: stdout is closed.\n")


def test_other_streams_that_are_closed(tmp_path: Path) -> None:
    """Without stdin or stderr a command does its work; its errors are in its exit code."""
    empty = f"the cache at {tmp_path / 'cache'} is empty\n"
    assert run(tmp_path, "cache", "list", before=lambda: os.close(0)) == (0, empty, "")
    assert run(tmp_path, "cache", "list", before=lambda: os.close(2)) == (0, empty, "")
    assert run(tmp_path, "cache", "list", before=lambda: os.closerange(0, 1) or os.close(2)) == (0, empty, "")
    assert run(tmp_path, "sweep", "--model", "nope", before=lambda: os.close(2)) == (1, "", "")
    code, out, said = run(tmp_path, "cache", "import", "-", before=lambda: os.close(0))
    assert (code, out) == (1, "")
    assert said is not None
    assert said.startswith("batchfinder: FILE: invalid value '-'; expected ")


def test_a_full_stderr(tmp_path: Path) -> None:
    """What cannot be told changes neither the output nor the exit code."""
    with open("/dev/full", "w") as full:
        empty = f"the cache at {tmp_path / 'cache'} is empty\n"
        assert run(tmp_path, "cache", "list", stderr=full) == (0, empty, None)
        assert run(tmp_path, "sweep", "--model", "nope", stderr=full) == (1, "", None)


def test_help_on_a_full_disk(tmp_path: Path) -> None:
    """It is no success either, and no traceback."""
    with open("/dev/full", "w") as full:
        code, _, said = run(tmp_path, "--help", stdout=full)
    assert (code, said) == (1, "")


@pytest.mark.parametrize("size", [100, 10**6])
def test_a_reader_that_goes_away(size: int, tmp_path: Path) -> None:
    """The code that a shell gives for SIGPIPE, and no words: what had been printed was not all."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(work=f"sys.stdin.readline(); print('x' * {size})")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path, PYTHONPATH=str(Path(__file__).parents[2]), PYTHONUNBUFFERED=""),
    )
    assert process.stderr is not None
    assert process.stdout is not None
    assert process.stderr.readline() == "at work\n"
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate("go on\n", timeout=60)
    assert (process.returncode, said) == (141, "")


def test_a_reader_that_is_not_there(tmp_path: Path) -> None:
    """It is noticed before the work."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        assert run(tmp_path, work="print('x')", stdout=out) == (141, None, "")
