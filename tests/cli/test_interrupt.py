"""Ctrl-C, as a terminal sends it, and other signals that end a process, whatever the sweep is doing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.command import COMMAND, HERE, Done, Run, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

SECONDS = 300.0
ENDS_WITHIN_SECONDS = 60.0
BUILDING, RECORDING = 1, 2
"""How many processes there are: the recording process, and a fork of it."""


def processes(temporary: Path) -> list[str]:
    """The recording processes of a sweep: they are told where their folder is."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            commands.append(path.read_bytes().decode(errors="replace"))
    return [command for command in commands if str(temporary) in command]


def at_work(temporary: Path, working: int) -> bool:
    """Whether a recording process and its forks, which have its command line, are so many."""
    return max(Counter(processes(temporary)).values(), default=0) >= working


def interrupted(
    folder: Path,
    arguments: tuple[str, ...],
    line: str,
    working: int,
    whole_group: bool,
    number: signal.Signals = signal.SIGINT,
) -> Done:
    """Start a sweep, wait for a line of its progress and for so many processes, and send it a signal.

    Nothing of it may be left.
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [*COMMAND, "sweep", *arguments],
        cwd=HERE,
        env=environment(folder / "cache", TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    told = ""
    while line not in told:
        said = process.stderr.readline()
        assert said, told
        told += said
    deadline = time.monotonic() + SECONDS
    # An earlier model's processes may still be ending: those that are meant are there for good.
    while not (at_work(temporary, working) and not time.sleep(0.3) and at_work(temporary, working)):
        assert time.monotonic() < deadline, processes(temporary)
        time.sleep(0.02)
    assert list(temporary.glob("batchfinder-*"))
    (os.killpg if whole_group else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=SECONDS)
    if number == signal.SIGKILL:  # what it started sees to it, and that takes a moment
        deadline = time.monotonic() + ENDS_WITHIN_SECONDS
        while (processes(temporary) or list(temporary.glob("batchfinder-*"))) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert processes(temporary) == []
    assert list(temporary.glob("batchfinder-*")) == []
    return Done(process.returncode, out, told + err)


@pytest.mark.parametrize("whole_group", [True, False], ids=["the whole group", "the process alone"])
def test_while_building(tmp_path: Path, whole_group: bool) -> None:
    """While the model is built: 130, one line, nothing on stdout, no child and no folder left."""
    done = interrupted(tmp_path, ("--gpu", "t4", "--model", "mine:slow_to_build"), "building", BUILDING, whole_group)
    assert done == Done(130, "", "building mine:slow_to_build\nbatchfinder: interrupted\n")


def test_while_recording(tmp_path: Path, run: Run) -> None:
    """While a later model is recorded: what was found is printed and kept, and the next run goes on from there."""
    arguments = ("--budget", "1GiB", "--model", "mine:tiny", "--json")
    done = interrupted(
        tmp_path, (*arguments, "--model", "mine:slow_to_record", "--seq-len", "16"), "[1/2]", RECORDING, True
    )
    assert done.code == 130
    (row,) = json.loads(done.out)["rows"]
    assert row["model"] == "mine:tiny"
    kept = "1 of 2 cells were found; they are cached, and the same command continues from there"
    assert done.err.splitlines()[2:] == [f"batchfinder: {kept}", "batchfinder: interrupted"]
    again = run("sweep", *arguments, "--seq-len", "16", "--seq-len", "32", cache=tmp_path / "cache").json["rows"]
    assert [found["source"] for found in again] == ["cache", "simulated"]
    assert again[0]["max_batch_size"] == row["max_batch_size"]


@pytest.mark.parametrize(
    ("model", "working", "number"),
    [("slow_to_build", BUILDING, signal.SIGTERM), ("slow_to_record", RECORDING, signal.SIGHUP)],
)
def test_asked_to_end(tmp_path: Path, model: str, working: int, number: signal.Signals) -> None:
    """SIGTERM and SIGHUP: the code a shell would give, one line, and no child and no folder left."""
    done = interrupted(tmp_path, ("--model", f"mine:{model}", "--seq-len", "16"), "building", working, False, number)
    assert done.code == 128 + number
    assert done.out == ""
    assert done.err.endswith(f"batchfinder: ended by {number.name}\n")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("model", "working"), [("slow_to_build", BUILDING), ("slow_to_record", RECORDING)])
def test_killed(tmp_path: Path, model: str, working: int) -> None:
    """SIGKILL: what it started ends at once, and takes the folder away."""
    arguments = ("--model", f"mine:{model}", "--seq-len", "16")
    assert interrupted(tmp_path, arguments, "building", working, False, signal.SIGKILL).code == -signal.SIGKILL
