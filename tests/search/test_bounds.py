"""Bounds: the lattice of sizes that may be tried."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.errors import InvalidValue
from batchfinder.search.base import DEFAULT_MAX_BATCH_SIZE, Bounds

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
            "max_batch_size: 7 will not do; expected at least 8, the smallest size that is at least 8.",
        ),
        (
            {"multiple_of": 8, "max_batch_size": 7},
            "max_batch_size: 7 will not do; expected at least 8, "
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
