"""Real steps in processes of their own, under a real RLIMIT_AS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Forks, forks
from tests.loop import limited

LIMIT_MIB = 128


@pytest.fixture(scope="module")
def loops() -> Iterator[Forks]:
    """Loops in forks of one process."""
    with forks("tests.loop.limited") as started:
        yield started


def test_the_answer_runs_and_a_tenth_more_does_not(loops: Forks, tmp_path: Path) -> None:
    """The process that searched trains at its answer, and a tenth more fails there; the next start certifies it.

    Where the next process happens to have more room under the limit, it searches again and finds one within a tenth.
    """
    tune = {"tolerance": 0.02, "cache": str(tmp_path)}
    first = loops.run(limit_mib=LIMIT_MIB, tune=tune, more=0.1)
    assert (first["source"], first["at"]) == ("measured", {"steps": limited.STEPS, "verdict": None}), first
    assert first["beyond"] == {"steps": 0, "verdict": "OUT_OF_MEMORY"}, first
    assert first["limit_unchanged"]
    assert any(not fits for _, fits in first["trials"])

    second = loops.run(limit_mib=LIMIT_MIB, tune=tune)
    if second["source"] == "cache":
        assert second["trials"] == [[first["largest"], True]], (first, second)
    else:
        assert 0.9 * first["largest"] <= second["largest"] <= 1.1 * first["largest"], (first, second)
    assert second["at"] == {"steps": limited.STEPS, "verdict": None}, (first, second)
