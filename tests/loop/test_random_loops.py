"""Any loop under any limit: the answer trains in a fresh process, and nothing clearly larger does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.forks import Forks, forks
from tests.loop.random_loops import STEPS, draw, searching, training

SEEDS = range(int(os.environ.get("BATCHFINDER_RANDOM_LOOPS", "3")))
"""As many as take a minute; the variable asks for more."""

KEPT = {"RLIMIT_AS": 6, "budget": 3}
"""MiB of the limit that the same steps do not take in a fresh process.

Of a ulimit the search keeps them for what training maps and a trial does not (measure/device_memory.py). Under a budget
its own process holds them: 2 to 3 MiB more at the same size, in each of 28 loops."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    """Forks of one process."""
    with forks("tests.loop.random_loops") as started:
        yield started


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_trains_and_nothing_clearly_larger(processes: Forks, seed: int) -> None:
    """BatchNorm, group losses, swallowed errors and leaks, under a ulimit or a budget: three steps at each size."""
    loop = draw(seed)
    found = processes.run(**searching(loop))
    answer = found["answer"]
    assert answer >= loop.smallest, (loop, found)
    assert answer % loop.group == 0, (loop, found)
    at = processes.run(**training(loop, answer))
    assert (at["trained"], at["steps"]) == (True, STEPS), (loop, found, at)
    room = replace(loop, limit_mib=loop.limit_mib - KEPT[loop.under])
    for share in (1 + loop.tolerance, 1.5):
        larger = (int(share * answer) // loop.group + 1) * loop.group
        beyond = processes.run(**training(room, larger))
        assert not beyond["trained"], (loop, found, larger, beyond)
