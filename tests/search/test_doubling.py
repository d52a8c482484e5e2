"""Doubling: the sizes it tries, in order."""

from __future__ import annotations

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.probe import FunctionProbe
from batchfinder.results import Shape, Stop
from batchfinder.search import Capped, Doubling


def tried(answer: int, search) -> tuple[list[int], int, Stop]:
    """Sizes, answer and stop on a device on which exactly the sizes up to `answer` run."""
    outcome = find_max_batch_size(FunctionProbe(lambda size, shape: size, answer), Shape(), search=search)
    return [trial.batch_size for trial in outcome.trials], outcome.max_batch_size, outcome.stop


def test_order():
    """It doubles until one fails and halves what is left."""
    assert tried(11, Doubling()) == ([1, 2, 4, 8, 16, 12, 10, 11], 11, Stop.EXACT)


def test_cap_is_tried_itself():
    """The last doubling goes to the cap, not beyond, and a cap that runs is the answer."""
    assert tried(500, Capped(Doubling(), 100)) == ([1, 2, 4, 8, 16, 32, 64, 100], 100, Stop.CAP)


def test_tolerance():
    """With a tolerance it ends as soon as a failure is near enough, below the true maximum."""
    assert tried(900, Doubling(tolerance=0.25))[1:] == (768, Stop.TOLERANCE)


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
    assert str(error.value) == f"tolerance: {tolerance!r} will not do; {expected}"
