"""Doubling and Bisection."""

from __future__ import annotations

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.probe import FunctionProbe
from batchfinder.results import Shape, StopReason
from batchfinder.search import Bisection, Capped, Doubling


def tried(answer: int, search) -> tuple[list[int], int, StopReason]:
    """Sizes, answer and stop on a device on which exactly the sizes up to `answer` run."""
    outcome = find_max_batch_size(FunctionProbe(lambda size, shape: size, answer), Shape(), search=search)
    return [trial.batch_size for trial in outcome.trials], outcome.max_batch_size, outcome.stop


def test_order():
    """It doubles until one fails and halves what is left."""
    assert tried(11, Doubling()) == ([1, 2, 4, 8, 16, 12, 10, 11], 11, StopReason.EXACT)


def test_cap_is_tried_itself():
    """The last doubling goes to the cap, not beyond, and a cap that runs is the answer."""
    assert tried(500, Capped(Doubling(), 100)) == ([1, 2, 4, 8, 16, 32, 64, 100], 100, StopReason.CAP)


def test_tolerance():
    """With a tolerance it ends as soon as a failure is near enough, below the true maximum."""
    assert tried(900, Doubling(tolerance=0.25))[1:] == (768, StopReason.TOLERANCE)


@pytest.mark.parametrize("answer", range(1, 300))
def test_probes(answer):
    """It takes exactly twice the number of binary digits of the answer."""
    assert len(tried(answer, Doubling())[0]) == 2 * answer.bit_length()


@pytest.mark.parametrize("tolerance", [-0.01, 1, 1.5, float("nan")])
def test_bad_tolerance(tolerance):
    """A tolerance that is not a share is refused."""
    with pytest.raises(InvalidValue) as error:
        Doubling(tolerance)
    expected = "expected a share from 0 (exact) to below 1, such as 0.01."
    assert str(error.value) == f"tolerance: invalid value {tolerance!r}; {expected}"


def tried_by_bisection(answer: int, search) -> list[int]:
    """The sizes probed on a device on which exactly the sizes up to `answer` run."""
    outcome = find_max_batch_size(FunctionProbe(lambda size, shape: size, answer), Shape(), search=search)
    assert outcome.max_batch_size == answer
    return [trial.batch_size for trial in outcome.trials]


def test_inside():
    """It halves the interval it was given."""
    assert tried_by_bisection(21, Bisection(16, 32)) == [24, 20, 22, 21]


def test_ends_are_probed():
    """An answer at either end of the interval is certified, not inferred."""
    assert tried_by_bisection(16, Bisection(16, 32)) == [24, 20, 18, 17, 16]
    assert tried_by_bisection(16, Bisection(16, 17)) == [16, 17]
    assert tried_by_bisection(31, Bisection(16, 32)) == [24, 28, 30, 31, 32]


def test_wrong_ends():
    """Below the interval it goes on halving, above it doubles."""
    assert tried_by_bisection(9, Bisection(16, 18)) == [17, 16, 8, 12, 10, 9]
    assert tried_by_bisection(40, Bisection(16, 18)) == [17, 18, 36, 72, 54, 45, 40, 42, 41]


def test_cap_inside():
    """A cap below the believed failure is the answer when it runs."""
    assert tried_by_bisection(20, Capped(Bisection(16, 32), 20)) == [20]


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (-1, 4, "low: invalid value -1; expected a size, or 0 when none is known to run."),
        (4, 4, "high: invalid value 4; expected a size above low, which is 4."),
    ],
)
def test_bad_ends(low, high, message):
    """Ends out of order are refused."""
    with pytest.raises(InvalidValue) as error:
        Bisection(low, high)
    assert str(error.value) == message
    assert Bisection(0, 1)
