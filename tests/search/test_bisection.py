"""Bisection: ends that steer, and are never taken on trust."""

from __future__ import annotations

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.probe import FunctionProbe
from batchfinder.results import Shape
from batchfinder.search import Bisection, Capped


def tried(answer: int, search) -> list[int]:
    """The sizes probed on a device on which exactly the sizes up to `answer` run."""
    outcome = find_max_batch_size(FunctionProbe(lambda size, shape: size, answer), Shape(), search=search)
    assert outcome.max_batch_size == answer
    return [trial.batch_size for trial in outcome.trials]


def test_inside():
    """It halves the interval it was given."""
    assert tried(21, Bisection(16, 32)) == [24, 20, 22, 21]


def test_ends_are_probed():
    """An answer at either end of the interval is certified, not inferred."""
    assert tried(16, Bisection(16, 32)) == [24, 20, 18, 17, 16]
    assert tried(16, Bisection(16, 17)) == [16, 17]
    assert tried(31, Bisection(16, 32)) == [24, 28, 30, 31, 32]


def test_wrong_ends():
    """Below the interval it goes on halving, above it doubles."""
    assert tried(9, Bisection(16, 18)) == [17, 16, 8, 12, 10, 9]
    assert tried(40, Bisection(16, 18)) == [17, 18, 36, 72, 54, 45, 40, 42, 41]


def test_cap_inside():
    """A cap below the believed failure is the answer when it runs."""
    assert tried(20, Capped(Bisection(16, 32), 20)) == [20]


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (-1, 4, "low: -1 will not do; expected a size, or 0 when none is known to run."),
        (4, 4, "high: 4 will not do; expected a size above low, which is 4."),
    ],
)
def test_bad_ends(low, high, message):
    """Ends out of order are refused."""
    with pytest.raises(InvalidValue) as error:
        Bisection(low, high)
    assert str(error.value) == message
    assert Bisection(0, 1)
