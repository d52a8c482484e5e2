"""`tune_trainer` on several gloo ranks, with DDP and FSDP through accelerate; the cases: `rank_trainers.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forks import Forks, forks
from tests.huggingface.trainers import MESSAGE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Forks]:
    """Runs a case on a number of ranks."""
    with forks("tests.huggingface.rank_trainers") as started:
        yield started


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_training_is_that_of_sizes_given_by_hand(ranks: Forks, kind: str) -> None:
    """All ranks take what fits the last one, keep the effective batch of 8 x 3 each, and train bit for bit."""
    failed = [f"on rank {rank}: {MESSAGE}" for rank in (0, 1)]
    assert ranks.run(size=2, case="identical", kind=kind) == [[[4, 6], failed, True, 3, kind == "fsdp"]] * 2
