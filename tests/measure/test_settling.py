"""Tests of batchfinder/measure/trial.py."""

from __future__ import annotations

import pytest

from batchfinder.measure.trial import SteadyStateCheck
from batchfinder.simulator.steady_state import MORE_STEPS


def taken(retries_in_steps: list[int]) -> tuple[int, str]:
    """Steps beyond the first two that a try takes, and the message; the cache is given back as often as listed."""
    given_back = 0

    def count() -> int:
        return given_back

    settling = SteadyStateCheck(count)
    given_back += sum(retries_in_steps[:2])
    steps = 0
    while settling.goes_on():
        given_back += retries_in_steps[2 + steps]
        steps += 1
    return steps, settling.message()


def test_a_size_that_never_needs_the_cache_takes_no_further_step() -> None:
    """Two steps without are enough."""
    assert taken([0, 0]) == (0, "")


@pytest.mark.parametrize(
    ("retries", "steps"),
    [([1, 0, 0], 1), ([0, 1, 0], 1), ([1, 1, 2, 0], 2), ([2, 3, 2, 2, 2, 1, 0], 5), ([1, 1, *[1] * 7, 0], 8)],
)
def test_a_size_that_settles_fits(retries: list[int], steps: int) -> None:
    """Steps are taken until one goes by without, and then no more."""
    assert taken(retries) == (steps, "")


def test_a_size_that_never_settles_does_not() -> None:
    """After so many steps that each gave the cache back no other is taken, and how often it was is said."""
    message = f"it ran, but only by giving back all cached memory {2 + 2 * MORE_STEPS} times"
    assert taken([1, 1, *[2] * MORE_STEPS]) == (MORE_STEPS, message)


@pytest.mark.parametrize(("retries", "times"), [(1, "once"), (3, "3 times")])
def test_steps_that_never_asked_have_not_settled(retries: int, times: str) -> None:
    """Where nobody takes a further step, nobody knows that it would have done without."""
    seen = iter([5, 5 + retries])
    assert (
        SteadyStateCheck(lambda: next(seen)).message() == f"it ran, but only by giving back all cached memory {times}"
    )


def test_a_part_that_never_settled_is_not_forgotten() -> None:
    """A later part of the same try that settles does not make up for it."""
    given_back = 0
    settling = SteadyStateCheck(lambda: given_back)
    given_back += 1
    while settling.goes_on():
        given_back += 1
    assert not settling.goes_on()
    assert settling.message()
