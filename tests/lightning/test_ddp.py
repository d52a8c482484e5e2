"""Several ranks under DDP: the search in lock step, failures on one of them, and none of it leaves a trace.

The cases are in `ddp_cases.py`; each has a time limit of its own, after which a rank that still waits is "hung".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.lightning.ddp_processes import Run, several_ranks
from tests.lightning.oom_net import MESSAGE
from tests.measure.messages import without_figures

pytestmark = pytest.mark.slow

IDENTICAL = (", accumulating", ", logged", ", scheduled", ", unused", ", static", ", views")
MORE_TIME = (
    "The output of the other ranks says what happened there. If one of them was only slow, allow more time: timeout= "
    "of init_process_group, of a Lightning trainer's strategy, or ddp_timeout of TrainingArguments."
)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a case on a number of ranks."""
    with several_ranks("ddp_cases") as started:
        yield started


@pytest.mark.parametrize("case", [f"identical{name}" for name in IDENTICAL])
def test_training_is_that_of_a_run_started_with_the_sizes(run: Run, case: str) -> None:
    """Losses, weights and optimizer states, bit for bit.

    With metrics reduced and gathered in each step, parameters that the first batch does not use, a static graph,
    gradients that are views of DDP's buckets, and a schedule as long as the run.
    """
    assert run(2, case) == [[8, 8, True, True, True, True]] * 2


def test_training_of_four_ranks(run: Run) -> None:
    """The same."""
    assert run(4, "identical") == [[8, 4, True, True, True, True]] * 4


def test_training_of_shards(run: Run) -> None:
    """The same under ModelParallelStrategy: FSDP with clipped gradients; then with tensor parallelism and a target."""
    assert run(2, "identical, sharded") == [[8, 8, True, True, True, True]] * 2
    assert run(4, "identical, sharded and accumulating") == [[8, 8, True, True, True, True]] * 4


def test_memory_runs_out_on_one_rank_in_forward_backward_and_optimizer(run: Run) -> None:
    """Search after search each rank ends with the size that the failing one fits, and with its state as it was."""
    for size, ranks, times in ((2, run(2, "injected"), 18), (4, run(4, "injected"), 3)):
        assert ranks == [[[1 + time % 2, True] for time in range(times)]] * size


def test_each_rank_fits_another_size(run: Run) -> None:
    """All take the smallest, and make up the target together; the message names the rank."""
    one = f"on rank 1: {MESSAGE}"
    assert run(2, "uneven") == [[4, "4 x 2 x 2 devices = 16", [1, 2, 4, 5, 6, 7, 8], [one], ""]] * 2
    ranks = run(4, "uneven")
    size, plan, _, failed, error = ranks[0]
    assert (size, plan, error) == (4, "4 x 2 x 4 devices = 32", "")
    assert failed == [f"on rank 3: {MESSAGE}"]
    assert ranks == ranks[:1] * 4


def test_a_real_limit_that_is_lower_on_one_rank(run: Run) -> None:
    """Its size is the one that all ranks train with, and they do."""
    ranks = run(2, "uneven limits")
    size, failed, error, steps = ranks[0]
    assert (error, steps) == ("", 4)
    assert size > 1
    assert "on rank 1" in failed
    assert ranks[1] == ranks[0]


def test_not_even_one_sample_on_one_rank(run: Run) -> None:
    """Every rank raises what happened there."""
    message = (
        f"OutOfMemory: batch size 1 does not fit: on rank 1: {MESSAGE} Try a smaller model, a lower precision, "
        "activation checkpointing or an optimizer with less state."
    )
    assert [[without_figures(text) for text in said] for said in run(2, "none fits")] == [[message], [message]]


@pytest.mark.parametrize("case", ["a bug in forward", "a bug in backward", "a bug in optimizer"])
def test_a_bug_on_one_rank(run: Run, case: str) -> None:
    """It is raised there as it came; the other rank says which rank it was on and what it said."""
    other = (
        "RankFailed: rank 1 of 2 raised this when it tried batch size 8, so that all ranks end: ValueError: the labels "
        "are wrong\nRank 1 prints its own traceback."
    )
    assert run(2, case) == [[other], ["ValueError: the labels are wrong"]]


def test_a_bug_on_one_rank_of_four(run: Run) -> None:
    """Every other rank hears of it."""
    ranks = run(4, "a bug in backward")
    assert ranks.pop(1) == ["ValueError: the labels are wrong"]
    assert [ended.partition(" when")[0] for (ended,) in ranks] == ["RankFailed: rank 1 of 4 raised this"] * 3


def test_data_that_one_rank_cannot_read(run: Run) -> None:
    """It ends the search before it begins."""
    other = (
        "RankFailed: rank 1 of 2 raised this when it looked at the data, so that all ranks end: FileNotFoundError: "
        "picture.png\nRank 1 prints its own traceback."
    )
    assert run(2, "data") == [[other], ["FileNotFoundError: picture.png"]]


@pytest.mark.parametrize("case", ["killed", "hung", "interrupted"])
def test_a_rank_that_is_not_there_any_more(run: Run, case: str) -> None:
    """Killed, hung or interrupted in a try: the other one ends, and says so."""
    waited, gone = run(2, case)
    assert waited == ["RankLost: rank 0 of 2 waited for rank 1, which ended", MORE_TIME]
    if case == "killed":
        assert gone.startswith("ended")
    if case == "interrupted":
        assert gone[0] == "SystemExit: 1"


def test_one_of_four_is_killed(run: Run) -> None:
    """All three others end."""
    ranks = run(4, "killed")
    for rank in (0, 2, 3):
        said, more_time = ranks[rank]
        assert re.fullmatch(rf"RankLost: rank {rank} of 4 waited for ranks? ([02-3], )*1(, [02-3])*, which ended", said)
        assert more_time == MORE_TIME


def test_the_second_start_of_several_ranks(run: Run) -> None:
    """It tries the answer once, and the first rank alone reads and writes the cache: as a fit begins and as it ends.

    The key says how many ranks there were, and those that differ from the first.
    """
    first, second = run(2, "cached")
    assert first == [5, True, [5], ["measured", "cache"], 4, 4, [2], 2]
    assert second == [5, True, [5], ["measured", "cache"], 0, 0, None, 0]


def test_a_run_that_goes_on_from_a_checkpoint(run: Run) -> None:
    """All ranks keep its size, after one try."""
    assert run(2, "resumed") == [[4, 4, "checkpoint", [4], 8]] * 2


def test_a_cache_that_cannot_be_used(run: Run) -> None:
    """The search goes on without it, and one rank says so."""
    told = (
        "BatchFinder cannot use the cache at FOLDER/a file: it is a file, not a directory. Results of this run are not "
        "cached. Pass BatchFinder(cache=...) a place that can be written, or cache=False."
    )
    assert run(2, "no cache") == [[5, "", told], [5, ""]]


def test_a_prediction(run: Run) -> None:
    """All begin with 0.85 of the least of any rank, and with one sample where a rank has none."""
    assert run(2, "predicted") == [[23, 17, ""]] * 2
    assert run(2, "unpredicted") == [[23, 1, ""]] * 2


def test_a_process_group_of_the_users(run: Run) -> None:
    """Its collectives wait for no rank in tries either: one rank runs out of memory, and none hangs."""
    assert run(2, "own group") == [[5, ""]] * 2


def test_one_rank_runs_out_of_memory_in_training(run: Run) -> None:
    """It says so itself, and lowers the record that all ranks share."""
    told = (
        "BatchFinder: fit ran out of memory at batch size 8, which ran when it was tried. The cache now says 7, which "
        "the next start tries before it uses it."
    )
    assert run(2, "ran out")[1] == ["OutOfMemoryError", told]


def test_stages_and_the_size_of_the_data(run: Run) -> None:
    """No size is tried that is more than a rank's part of the data; validation is served within a fit and alone."""
    assert run(2, "stages") == [[9, 9, 6, 6]] * 2
