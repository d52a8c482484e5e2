"""`tune_batch_size` on several gloo ranks, with models of DDP, FSDP and tensor parallelism; the cases: `rank_loops.py`.

What each rank came to is JSON; a rank that hangs is killed after a time limit and says "hung".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Forks, forks

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Runs a case on a number of ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENDED", str(tmp_path_factory.mktemp("ranks") / "ended"))
        patch.setenv("BATCHFINDER_CACHE", str(tmp_path_factory.mktemp("ranks") / "cache"))
        with forks("tests.loop.rank_loops") as started:
            yield started


@pytest.mark.parametrize("kind", ["ddp", "ddp unused", "ddp static", "fsdp", "fsdp1", "tp"])
def test_training_after_a_search_is_that_of_a_loop_without_it(ranks: Forks, kind: str) -> None:
    """Where one rank runs out of memory in a backward, all find what it fits, and train on bit for bit.

    With replicas, of which some parameters are not always used, or in a static graph; with shards of either FSDP; and
    with layers that are spread over the ranks. A step has been taken before.
    """
    assert ranks.run(size=2, case="identical", kind=kind) == [[3, True, 5]] * 2


def test_replicas_of_shards(ranks: Forks) -> None:
    """The same with HSDP, on four ranks."""
    assert ranks.run(size=4, case="identical", kind="hsdp") == [[3, True, 5]] * 4


def test_memory_runs_out_on_each_rank_in_each_stage(ranks: Forks) -> None:
    """In forward, backward, optimizer and a collective of FSDP's; the others hear of it, and all is put back."""
    for wrong, longest in ranks.run(size=2, case="injected", kind="fsdp", times=1):
        assert wrong == []
        assert longest < 60


def test_the_copy_is_of_this_ranks_shards_alone(ranks: Forks) -> None:
    """Of weights, optimizer state and their padding: half of the whole on each of two ranks.

    The key has the shards, and whether the weights stay gathered after a forward; of a whole model nothing.
    """
    rows = []
    for copied, whole, (resharded, kept, none) in ranks.run(size=2, case="shards", kind="fsdp"):
        assert copied < 0.51 * whole
        assert resharded != kept
        assert none == {}
        rows += [shape for name, shape, *_ in resharded["sharding"] if name == "head.weight"]
    assert rows == [[3, 32], [2, 32]]


def test_a_real_limit(ranks: Forks) -> None:
    """It is lower on the last rank: all end with one size, train with it, and a tenth more fails."""
    ended = ranks.run(size=2, case="limited", kind="fsdp", limit_mib=192, lower_mib=32, steps=STEPS, more=0.1)
    first, last = ended
    assert first["tries"] == last["tries"]
    assert first["size"] == last["size"] > 8
    assert all(message.startswith("on rank 1") for _, message in first["tries"] if message)
    assert [each["at"] for each in ended] == [[STEPS, "ran"]] * 2
    assert last["beyond"] == ["OUT_OF_MEMORY"]
    assert first["beyond"] != ["ran"]


def test_the_second_start(ranks: Forks, tmp_path: Path) -> None:
    """It tries the answer once; a target is made up by all ranks."""
    for kind in ("fsdp", "ddp target"):
        first, second = ranks.run(size=2, case="cached", kind=kind, folder=str(tmp_path / kind))[0]
        assert first[:2] == [5 if kind == "fsdp" else 4, "measured"]
        assert second == [first[0], "cache", 1]


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_rank_that_is_not_there_any_more(ranks: Forks, how: str) -> None:
    """The others end within the time limit, and name it and what they did."""
    first, *_ = ranks.run(size=2, case="ends", how=how)
    seconds = 3 if how == "hung" else 60
    assert first.startswith(
        "RankLost: rank 0 of 2 waited for rank 1, which ended or did not answer within "
        f"{seconds} s when it tried batch size 4: "
    )


def test_a_bug_on_one_rank(ranks: Forks) -> None:
    """It is raised there as it came, and ends the others."""
    first, last = ranks.run(size=2, case="ends", how="a bug")
    assert last == "ValueError: the labels are wrong"
    assert first.startswith("RankFailed: rank 1 of 2 raised this when it tried batch size 4, so that all ranks end: ")


def test_the_wrapper_of_ddp_is_to_be_named(ranks: Forks) -> None:
    """The module in it does not do: a try must not reduce gradients, and DDP is told so."""
    expected = "the DistributedDataParallel that train_step runs among them, so that it can be put back"
    for said in ranks.run(size=2, case="unnamed"):
        assert expected in said
