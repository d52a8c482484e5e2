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


@pytest.mark.slow
@pytest.mark.exhaustive  # its like on a card of the CUDA stub is not
def test_the_answer_runs_and_a_tenth_more_does_not(loops: Forks, tmp_path: Path) -> None:
    """The process that searched trains at its answer, and a tenth more fails there.

    The next start certifies it. Where a larger size had run as well, and so nothing was cached, or where the try fails,
    it searches anew and finds one within a tenth. In a process that has not searched a third more fails.
    """
    tune = {"tolerance": 0.02, "cache": str(tmp_path)}
    first = loops.run(limit_mib=LIMIT_MIB, tune=tune, more=0.1)
    assert (first["source"], first["at"]) == ("measured", {"steps": limited.STEPS, "verdict": None}), first
    assert first["beyond"] == {"steps": 0, "verdict": "OUT_OF_MEMORY"}, first
    assert first["limit_unchanged"]
    assert any(not fits for _, fits in first["trials"])
    ran_larger = any(fits and size > first["largest"] for size, fits in first["trials"])

    second = loops.run(limit_mib=LIMIT_MIB, tune=tune)
    if second["source"] == "cache":
        assert not ran_larger, (first, second)
        assert second["trials"] == [[first["largest"], True]], (first, second)
    else:
        assert ran_larger or second["trials"][0] == [first["largest"], False], (first, second)
        assert abs(second["largest"] - first["largest"]) <= 0.1 * first["largest"], (first, second)
    assert second["at"] == {"steps": limited.STEPS, "verdict": None}, (first, second)

    third = loops.run(limit_mib=LIMIT_MIB, batch_size=first["largest"] * 4 // 3 + 1)
    assert third["at"] == {"steps": 0, "verdict": "OUT_OF_MEMORY"}, (first, third)
