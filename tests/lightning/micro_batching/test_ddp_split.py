"""Split batches under DDP: one gradient, whatever each rank makes of its batch, and one run, whichever rank fails.

The cases are in `ddp_split_cases.py`; each has a time limit of its own, after which a rank that still waits is "hung".
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lightning.ddp_processes import Run, several_ranks
from tests.lightning.varied_lengths import MESSAGE

pytestmark = pytest.mark.slow

EXACT = ("", ", last backward", ", unused", ", unused, last backward", ", views")


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a case on a number of ranks."""
    with several_ranks("ddp_split_cases") as started:
        yield started


@pytest.mark.parametrize("case", EXACT)
def test_the_gradient_is_that_of_the_whole_batches(run: Run, case: str) -> None:
    """And what is logged over all ranks, although one makes more micro-batches than the other.

    With gradients that meet in the last backward and afterwards, with parameters that one rank's first micro-batches
    use and no other, or nobody does, and with gradients that are views of DDP's buckets.
    """
    first, second = run(2, f"exact{case}")
    assert first == second
    assert first[:3] + first[4:] == [True] * 4
    assert (first[3] > 0) == ("unused" in case)  # gradients that nobody's batch has are missing, as without splitting


def test_the_gradient_of_four_ranks(run: Run) -> None:
    """The same, with parameters that are not always used."""
    ranks = run(4, "exact, unused")
    assert ranks == ranks[:1] * 4
    assert ranks[0][:3] == [True] * 3


def test_memory_runs_out_on_one_rank_in_forward_or_backward(run: Run) -> None:
    """In each batch on another rank: bit for bit the run without, its logs and its number of steps."""
    assert run(2, "injected") == [[6, True, True, True, 12]] * 2
    assert run(4, "injected") == [[3, True, True, True, 12]] * 4


def test_one_rank_has_less_memory(run: Run) -> None:
    """All make smaller micro-batches from then on; the weights are within rounding; the rank that failed says so."""
    silent, said = run(2, "shrinks")
    assert silent == [{"8": 8, "16": 3}, True, []]
    assert said[:2] == silent[:2]
    assert said[2] == [
        "BatchFinder: batch 2 ran out of memory on rank 1 in micro-batches of 8, 8 and 6 samples of length 16. Each "
        "time it was run again from its start with memory released, at last in micro-batches of at most 3, and "
        f"nothing was lost. Batches of this length and longer are split so from now on. The device said: {MESSAGE}"
    ]


def test_a_sample_that_does_not_fit_on_one_rank_ends_all(run: Run) -> None:
    """The rank that has it names it, the other names the rank."""
    (other,), (own,) = run(2, "hopeless")
    assert own.startswith("SampleDoesNotFit: sample 2 of batch 0, 16 tokens long, ran out of memory on its own")
    assert other == (
        f"RankFailed: rank 1 of 2 raised this when it ran batch 0, so that all ranks end: {own}\n"
        "Rank 1 prints its own traceback."
    )


def test_a_bug_on_one_rank_ends_all(run: Run) -> None:
    """At once, and not when the others have waited for its gradients."""
    assert run(2, "bug") == [
        [
            "RankFailed: rank 1 of 2 raised this when it ran batch 1, so that all ranks end: KeyError: 'labels_2'\n"
            "Rank 1 prints its own traceback."
        ],
        ["KeyError: 'labels_2'"],
    ]


def test_a_rank_that_dies_is_missed(run: Run) -> None:
    """The other ends with an error instead of waiting."""
    (left,), dead = run(2, "dies")
    assert left.startswith("RankLost: rank 0 of 2 waited for another rank, which ended or did not answer within ")
    assert dead == "ended\n"


def test_the_finder_on_two_ranks(run: Run) -> None:
    """A size for each length on all ranks, and loaders that make up the target together, one step each."""
    for case in ("found", "found, unused"):
        assert run(2, case) == [[16, {"4": 16, "8": 8, "16": 4}, 4]] * 2


@pytest.mark.exhaustive
def test_memory_that_is_really_taken_while_training(run: Run) -> None:
    """Under a real limit the sizes that were found train; when it becomes lower, the run goes on with smaller ones."""
    error, steps, found, in_use, said = run(1, "limited")
    assert (error, steps, said) == ("", 8, [])
    assert found[-1] == in_use[-1] < 32
    error, steps, found, in_use, said = run(1, "limited further in training")
    assert (error, steps) == ("", 8)
    assert "DefaultCPUAllocator: can't allocate memory" in said[0]
    assert in_use[-1] < found[-1]
