"""A real Trainer in a process of its own, under a real RLIMIT_AS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import forks
from tests.huggingface import limited


@pytest.mark.slow
@pytest.mark.exhaustive  # its like on a card of the CUDA stub is not
def test_the_answer_trains_and_twice_as_much_does_not(tmp_path: Path) -> None:
    """With the effective batch kept; the next start, with as much memory, trains too.

    That it uses the answer is asserted in `test_tune.py`: so near a limit, a record may find no memory to be written.
    """
    with forks("tests.huggingface.limited") as started:
        first = started.run(limit_mib=64, folder=str(tmp_path), beyond=True)
        second = started.run(limit_mib=64, folder=str(tmp_path))
    assert any(not fits for _, fits in first["trials"]), first
    size, accumulation = first["sizes"]
    assert 0 < size <= first["largest"], first
    assert size * accumulation == limited.TARGET
    assert (first["source"], first["steps"], first["limit_unchanged"]) == ("measured", 1, True), first
    assert first["verdict"] == "OUT_OF_MEMORY", first
    assert (second["sizes"][0] * second["sizes"][1], second["steps"]) == (limited.TARGET, 1), (first, second)
