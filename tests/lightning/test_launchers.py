"""Strategies that train in processes of their own: the caller's finder has what was found there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.forks import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("ddp_fork", 2),
        *(pytest.param(*rest, marks=pytest.mark.exhaustive) for rest in (("ddp_fork", 1), ("ddp_spawn", 2))),
    ],
)
def test_the_caller_can_read_what_was_found(strategy: str, devices: int) -> None:
    """Size, plan and results, as after a fit in this process; the trainer's own accumulation is as it was."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.lightning.launched", strategy, str(devices)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accumulation = 4 // devices
    plan = f"8 x {accumulation}{' x 2 devices' if devices == 2 else ''} = 32"
    assert json.loads(done.stdout.splitlines()[-1]) == [8, plan, 8, 1]
