"""The command line, in this process or in one of its own, in this folder, which has code of a user's in `mine.py`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cli.main import main
from tests.prefork import Prefork

HERE = Path(__file__).parent
COMMAND = (sys.executable, "-m", "batchfinder")
# One thread: several of them wait for each other where the machine does other work as well.
_ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """What it printed with --json."""
        assert self.code == 0, self.err
        printed: dict[str, Any] = json.loads(self.out)
        return printed

    @property
    def row(self) -> dict[str, Any]:
        """The one row of a sweep."""
        (row,) = self.json["rows"]
        return dict(row)


Run = Callable[..., Done]


def environment(cache: Path, **more: str) -> dict[str, str]:
    """This process's, without what changes the answers or their looks: no card is seen either."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTORCH_") and name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TERM")
    }
    return {**own, "BATCHFINDER_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", **_ALONE, **more}


def run_here(prefork: Prefork, *arguments: str, cache: Path, folder: Path = HERE, **more: str) -> Done:
    """Run the command line in this process, in a folder and with the variables of a process of its own.

    What it starts to take real steps is started as ever; what it starts to record is forked.
    """
    out, err = io.StringIO(), io.StringIO()
    own = environment(cache, **more)
    with pytest.MonkeyPatch.context() as patch, prefork.patched():
        for name in set(os.environ) - set(own):
            patch.delenv(name)
        for name, value in own.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    return Done(code, out.getvalue(), err.getvalue())


def run_command(*arguments: str, cache: Path, folder: Path = HERE, **more: str) -> Done:
    """Run `python -m batchfinder` to its end."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=environment(cache, **more),
        capture_output=True,
        text=True,
        timeout=900,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def records_too_large() -> Iterator[None]:
    """Let no file of this process have more than 1 KiB, which is less than a record of the cache has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
