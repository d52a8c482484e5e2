"""(e) The tests marked `gpu`, run within a time, with what became of each. Nothing imports torch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cuda_parts.check import Check
from benchmarks.cuda_parts.wheels import ROOT

NAME = "tests"

_MARK = re.compile(r"\bpytest\.mark\.gpu\b")
_LINE = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_LEFT_OUT = "not test_measured_on_a_gpu"
"""It takes up to an hour; `batchfinder reproduce bert-2019 --measured` is the same."""

_KEPT = 6000


def run(check: Check) -> None:
    """Run them in the time that is left.

    Args:
        check: the run.
    """
    if check.in_time(NAME, "the tests marked gpu"):
        check.file.result[NAME] = run_gpu_tests(ROOT, check.clock.left(NAME))
        check.file.save()


def marked_files(root: Path) -> list[str]:
    """The test files that have such a test: collecting all others would take longer than running these.

    Args:
        root: the repository's folder.
    """
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if _MARK.search(file.read_text(encoding="utf-8"))]


def run_gpu_tests(root: Path, seconds: float) -> dict[str, Any]:
    """Run them one after another in one process.

    Args:
        root: the repository's folder.
        seconds: after which they are ended.

    Returns:
        JSON values: the number of each result, those that are no pass by name, and the end of what was printed.
    """
    files = marked_files(root)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "--strict-markers"]
    command += ["-v", "-m", "gpu", "-k", _LEFT_OUT, "-p", "no:cacheprovider", "--tb=short", *files]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        )
        ended = True
        try:
            process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"command": " ".join(["python", *command[1:]]), "ended": ended, **read_results(text)}


def read_results(text: str) -> dict[str, Any]:
    """What pytest's verbose output says.

    Args:
        text: as it was printed.
    """
    results = {name: outcome.lower() for name, outcome in _LINE.findall(text)}
    counts = {outcome: list(results.values()).count(outcome) for outcome in sorted(set(results.values()))}
    others = {name: outcome for name, outcome in results.items() if outcome not in ("passed", "skipped")}
    return {"counts": counts, "not_passed": others, "end_of_output": text[-_KEPT:] if others or not results else ""}
