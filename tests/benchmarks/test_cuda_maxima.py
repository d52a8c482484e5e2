"""The largest size that trains, and lists laid side by side, against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.cuda_parts.alignment import align
from benchmarks.cuda_parts.maxima import REACH, true_maximum

SIZES = st.lists(st.integers(0, 3), max_size=12)


@example(true=40, predicted=41)
@example(true=40, predicted=37)
@given(true=st.integers(0, 300), predicted=st.integers(0, 600))
def test_the_largest_is_found_from_any_prediction(true: int, predicted: int) -> None:
    """And every size within reach of it was tried, none twice."""
    tried: list[int] = []

    def trains(size: int) -> bool:
        tried.append(size)
        return size <= true

    assert true_maximum(trains, predicted) == true
    assert len(tried) == len(set(tried))
    assert set(range(max(1, true - REACH), true + REACH + 1)) <= set(tried)
    assert min(tried) >= 1


@given(true=st.integers(1, 100), away=st.integers(-2, 2), holes=st.sets(st.integers(1, 100)), beyond=st.integers(1, 3))
def test_sizes_that_train_beyond_ones_that_do_not(true: int, away: int, holes: set[int], beyond: int) -> None:
    """Near a fair prediction no order is relied on: a size that trains within reach above a failure is the answer."""
    last = true + beyond
    assert true_maximum(lambda size: size in (true, last) or (size < true and size not in holes), true + away) == last


def test_an_exact_prediction_takes_seven_tries() -> None:
    """The three on either side, and itself."""
    tried: list[int] = []
    assert true_maximum(lambda size: tried.append(size) or size <= 40, 40) == 40  # type: ignore[func-returns-value]
    assert tried == [*range(37, 44)]


@given(one=SIZES, other=SIZES)
def test_an_alignment_leaves_as_little_over_as_can_be(one: list[int], other: list[int]) -> None:
    """As many pairs as the longest common subsequence has, equal and in order on both sides."""
    pairs = align(one, other)
    assert pairs is not None
    assert len(pairs) == _common(one, other)
    assert all(one[a] == other[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


def test_too_many_differences_are_given_up() -> None:
    """Two lists that have nothing in common differ by all they have."""
    assert align([1] * 5, [2] * 5, most=9) is None
    assert align([1] * 5, [2] * 5, most=10) == []


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]
