"""Tests of batchfinder/distributed/agreement.py, with two and four ranks; their cases are in `rank_collectives.py`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch

from batchfinder.distributed.agreement import Ranks, agree
from batchfinder.errors import RankFailed, RankLost
from batchfinder.results import Measurement, Verdict
from tests.forks import Forks, forks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Forks]:
    """The process that is forked for each case."""
    with forks("tests.distributed.rank_collectives") as started:
        yield started


def test_one_process_alone() -> None:
    """Each collective returns at once, and errors are its own."""
    with closing(Ranks.open()) as alone:
        assert (alone.rank, alone.size) == (0, 1)
        assert (alone.all_reduce_min(3, 4), alone.all_gather("x")) == ((3, 4), ["x"])
        assert (alone.barrier_call(lambda: 7, "counted"), alone.all_gather_call(lambda: 7, "counted")) == (7, [7])
        with pytest.raises(ZeroDivisionError):
            alone.barrier_call(lambda: 1 // 0, "counted")


def test_the_slowest_rank_says_how_long_a_step_takes() -> None:
    """As the fullest says what it takes."""
    ranks = [Measurement(Verdict.FITS, 7, 9, step_seconds=0.5, micro_batch_seconds=0.3) for _ in range(2)]
    slower = replace(ranks[1], peak_reserved_bytes=8, step_seconds=0.6)
    seen = agree([ranks[0], slower])
    assert (seen.step_seconds, seen.micro_batch_seconds, seen.peak_reserved_bytes) == (0.6, 0.3, 9)


def test_an_error_holds_nothing_once_it_was_handled() -> None:
    """What the failed step had is free then, and not when garbage is collected."""
    held: list[weakref.ref[torch.Tensor]] = []

    def fails() -> None:
        tensor = torch.ones(1)
        held.append(weakref.ref(tensor))
        raise ValueError

    gc.disable()
    try:
        with suppress(ValueError):
            Ranks().barrier_call(fails, "counted")
        assert held[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [2, 4])
def test_numbers_and_things(ranks: Forks, size: int) -> None:
    """The smallest, in 64 bits, and what every rank has, in order."""
    expected = [[0, 1 - size, (1 << 62) - size + 1], [{"rank": rank} for rank in range(size)]]
    assert ranks.run(size=size, case="numbers") == [expected] * size


@pytest.mark.parametrize("size", [2, 4])
def test_what_fails_on_one_rank_ends_all_and_none_is_left_behind(ranks: Forks, size: int) -> None:
    """It is raised unchanged where it failed; the others say where; the group is still of use."""
    for rank, (well, every, *failed, again) in enumerate(ranks.run(size=size, case="calls")):
        assert (well, every) == (10 * rank, [10 * other for other in range(size)])
        assert again == ["still here"] * size
        here = "ValueError: the labels are wrong"
        there = (
            f"RankFailed: rank {size - 1} of {size} raised this when it counted, so that all ranks end: {here}\n"
            f"Rank {size - 1} prints its own traceback."
        )
        assert failed == [here if rank == size - 1 else there] * 2


def test_a_rank_that_leaves(ranks: Forks) -> None:
    """Whoever waits for it is told at once, and the training's own group is as it was."""
    stayed, left = ranks.run(size=2, case="leaves")
    words = "RankLost: rank 0 of 2 waited for another rank, which ended or did not answer within 1800 s"
    assert stayed[:2] == [words, "RankLost"]
    assert left[0] == "left"
    assert stayed[2].startswith("RankLost: rank 0 of 2")
    assert left[1].startswith("RankLost: rank 1 of 2")


def test_a_rank_that_comes_too_late(ranks: Forks) -> None:
    """The others wait no longer than they may, and say which it was and what they did."""
    waited, _ = ranks.run(size=2, case="late")
    assert waited == [{"rank": 0, "size": 2, "seconds": 1.0, "what": "tried batch size 8", "missing": [1]}, True]


def test_a_rank_that_never_comes(ranks: Forks) -> None:
    """A group that cannot be opened is the same error, and says how it is opened."""
    opened = "ranks agree over gloo; GLOO_SOCKET_IFNAME says which network it uses"
    assert ranks.run(size=2, case="absent") == [["RankLost", opened], ["", ""]]


def test_messages() -> None:
    """What happened, the numbers, the next move."""
    assert str(RankFailed(1, 4, "tried batch size 8", "ValueError: no")) == (
        "rank 1 of 4 raised this when it tried batch size 8, so that all ranks end: ValueError: no\n"
        "Rank 1 prints its own traceback."
    )
    assert str(RankLost(0, 4, 1800.0, "Connection reset by peer", "tried batch size 8", [1, 3])) == (
        "rank 0 of 4 waited for ranks 1, 3, which ended or did not answer within 1800 s when it tried batch "
        "size 8: Connection reset by peer\nThe output of the other ranks says what happened there. If one of them was "
        "only slow, allow more time: timeout= of init_process_group, of a Lightning trainer's strategy, or ddp_timeout "
        "of TrainingArguments."
    )


def test_the_first_ranks_cache(ranks: Forks) -> None:
    """It alone is read and written; that it cannot be is known on every rank."""
    failed = (
        "CacheFailed: the cache at s3://bucket cannot be used: no credentials. Set BATCHFINDER_CACHE or --cache to a "
        "place that can be written, or pass --no-cache."
    )
    assert ranks.run(size=2, case="places") == [[5, 2, failed], [5, 0, failed]]


def test_nothing_is_unpickled(ranks: Forks) -> None:
    """A pickle runs code of its sender's; ranks send each other JSON. The one name is the case's own, which is seen."""
    assert ranks.run(size=2, case="audited") == [["batchfinder.results.Verdict"]] * 2


def test_a_size_fits_where_it_fits_on_all(ranks: Forks) -> None:
    """The verdict is that of the first rank it fails on, the peak the largest."""
    seen = [[True, True, False], ["", "", "on rank 0"], 91]
    assert ranks.run(size=2, case="probes") == [seen] * 2
    assert ranks.run(size=2, case="readings") == [[None, 11, 2.0, 5]] * 2
