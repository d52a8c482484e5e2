"""Bounds and Bracket."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.errors import InvalidValue
from batchfinder.results import Measurement, Shape, StopReason, Trial, Verdict
from batchfinder.search.base import DEFAULT_MAX_BATCH_SIZE, Bounds, Bracket

QUICK = settings(derandomize=True, deadline=None, max_examples=200)


@QUICK
@given(st.integers(1, 40), st.integers(1, 120), st.integers(1, 12), st.integers(0, 150))
def test_against_a_list(floor, cap, of, size):
    """`first`, `last`, `floor` and `after` are what a list of the sizes says."""
    legal = [each for each in range(floor, cap + 1) if each % of == 0]
    if not legal:
        with pytest.raises(InvalidValue):
            Bounds(floor, cap, of)
        return
    bounds = Bounds(floor, cap, of)
    assert (bounds.first, bounds.last) == (legal[0], legal[-1])
    assert bounds.floor(size) == max((each for each in legal if each <= size), default=0)
    following = [each for each in legal if each > size]
    assert bounds.after(size) == following[0] if following else bounds.after(size) > bounds.last


def test_defaults():
    """Without wrappers every size from 1 to the default cap may be tried."""
    assert (Bounds().first, Bounds().last, Bounds().after(0)) == (1, DEFAULT_MAX_BATCH_SIZE, 1)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            {"min_batch_size": 8, "max_batch_size": 7},
            "max_batch_size: invalid value 7; expected at least 8, the smallest size that is at least 8.",
        ),
        (
            {"multiple_of": 8, "max_batch_size": 7},
            "max_batch_size: invalid value 7; expected at least 8, "
            "the smallest size that is at least 1 and a multiple of 8.",
        ),
    ],
)
def test_nothing_left(bounds, message):
    """Bounds that leave nothing to try are refused, with the smallest cap that would do."""
    with pytest.raises(InvalidValue) as error:
        Bounds(**bounds)
    assert str(error.value) == message


def test_one_size_left():
    """A cap at the floor leaves one size."""
    bounds = Bounds(min_batch_size=8, max_batch_size=8)
    assert (bounds.first, bounds.last, bounds.after(8)) == (8, 8, 9)


def trial(size: int, verdict: Verdict) -> Trial:
    """A probed size without peaks."""
    return Trial(size, Shape(), Measurement(verdict))


@pytest.mark.parametrize("verdict", list(Verdict))
def test_update(verdict):
    """A size that ran raises the low end, any failure lowers the high end."""
    bracket = Bracket(Bounds(), 4, 16).update(trial(8, verdict))
    assert (bracket.low, bracket.high) == ((8, 16) if verdict is Verdict.FITS else (4, 8))


@pytest.mark.parametrize(
    ("low", "high", "size", "expected"),
    [(4, 16, 9, 9), (4, 16, 4, 5), (4, 16, 0, 5), (4, 16, 16, 15), (4, 16, 99, 15), (4, None, 99, 64), (0, None, 0, 1)],
)
def test_inside(low, high, size, expected):
    """A proposal is moved strictly between the ends and to no more than the cap."""
    assert Bracket(Bounds(max_batch_size=64), low, high).inside(size) == expected


def test_inside_multiples():
    """A proposal is rounded down to the step where that stays inside."""
    bracket = Bracket(Bounds(multiple_of=8), 8, 40)
    assert [bracket.inside(size) for size in (9, 23, 24, 39, 50)] == [16, 16, 24, 32, 32]


@pytest.mark.parametrize(
    ("low", "high", "tolerance", "expected"),
    [
        (0, None, 0.0, None),
        (64, None, 0.0, StopReason.CAP),
        (63, None, 0.0, None),
        (63, 64, 0.0, StopReason.EXACT),
        (62, 64, 0.0, None),
        (0, 1, 0.0, StopReason.EXACT),
        (0, 2, 0.5, None),
        (45, 50, 0.1, StopReason.TOLERANCE),
        (44, 50, 0.1, None),
        (49, 50, 0.1, StopReason.EXACT),
    ],
)
def test_stop(low, high, tolerance, expected):
    """It may end at the cap, beside a failure, or within the tolerance of one, and not one size sooner."""
    assert Bracket(Bounds(max_batch_size=64), low, high).stop(tolerance) is expected


def test_stop_at_the_floor():
    """A floor that failed leaves nothing in question, and the answer is 0."""
    assert Bracket(Bounds(min_batch_size=8), 0, 8).result(0.0) == (0, StopReason.EXACT)


def test_result_too_early():
    """Asking for a result before the end is a bug and says so."""
    with pytest.raises(RuntimeError, match="asked for a result while sizes above 4 are still in question"):
        Bracket(Bounds(), 4, 16).result(0.0)
