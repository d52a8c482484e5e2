"""Bracket: what is certain, and when that is enough."""

from __future__ import annotations

import pytest

from batchfinder.results import Measurement, Shape, Stop, Trial, Verdict
from batchfinder.search.base import Bounds, Bracket


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
        (64, None, 0.0, Stop.CAP),
        (63, None, 0.0, None),
        (63, 64, 0.0, Stop.EXACT),
        (62, 64, 0.0, None),
        (0, 1, 0.0, Stop.EXACT),
        (0, 2, 0.5, None),
        (45, 50, 0.1, Stop.TOLERANCE),
        (44, 50, 0.1, None),
        (49, 50, 0.1, Stop.EXACT),
    ],
)
def test_stop(low, high, tolerance, expected):
    """It may end at the cap, beside a failure, or within the tolerance of one, and not one size sooner."""
    assert Bracket(Bounds(max_batch_size=64), low, high).stop(tolerance) is expected


def test_stop_at_the_floor():
    """A floor that failed leaves nothing in question, and the answer is 0."""
    assert Bracket(Bounds(min_batch_size=8), 0, 8).result(0.0) == (0, Stop.EXACT)


def test_result_too_early():
    """Asking for a result before the end is a bug and says so."""
    with pytest.raises(RuntimeError, match="asked for a result while sizes above 4 are still in question"):
        Bracket(Bounds(), 4, 16).result(0.0)
