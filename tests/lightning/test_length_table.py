"""Sizes by length: only what was tried, and only ever less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchfinder.lightning.micro_batching.micro_batch import LengthTable, smaller

SIZES: dict[int | None, int] = {512: 8, 128: 40, 256: 18}


def test_a_length_gets_the_size_of_the_next_longer_one() -> None:
    """Never the size of a shorter one, although more might fit."""
    table = LengthTable(SIZES)
    assert [table.size_for(length) for length in (1, 128, 129, 256, 257, 512)] == [40, 40, 18, 18, 8, 8]
    assert table.size_for(None) == 8
    assert table.sizes == SIZES


def test_beyond_the_longest_sizes_go_down_with_the_square() -> None:
    """As attention's memory goes up; one sample is the least."""
    table = LengthTable(SIZES)
    assert [table.size_for(length) for length in (513, 1024, 1449, 100_000)] == [7, 2, 1, 1]
    assert table.tabled(513) is None


def test_data_without_lengths_has_one_size() -> None:
    """Whatever length is asked for."""
    table = LengthTable({None: 5})
    assert (table.size_for(None), table.size_for(99), table.sizes) == (5, 5, {None: 5})
    table.lower(None, 3)
    assert table.sizes == {None: 3}
    assert table.values() == [3]


def test_lowering_lowers_longer_lengths_and_no_shorter_ones() -> None:
    """Also what is beyond the longest."""
    table = LengthTable(SIZES)
    table.lower(200, 12)
    assert table.sizes == {128: 40, 256: 12, 512: 8}
    table.lower(300, 3)
    assert table.sizes == {128: 40, 256: 12, 512: 3}
    assert table.size_for(600) == 2
    table.lower(64, 2)
    assert table.sizes == {128: 2, 256: 2, 512: 2}


def test_lowering_beyond_the_longest_leaves_the_table() -> None:
    """Until something in it fails."""
    table = LengthTable(SIZES)
    table.lower(1024, 1)
    assert table.sizes == SIZES
    assert [table.size_for(length) for length in (512, 600, 1024)] == [8, 2, 1]


def test_a_cut_is_small_at_first_and_never_none() -> None:
    """A fifth, then half each time, down to one sample."""
    assert [smaller(100, cuts) for cuts in (0, 1, 2)] == [80, 50, 50]
    assert [smaller(2, cuts) for cuts in (0, 1)] == [1, 1]


@given(
    st.dictionaries(st.integers(1, 600), st.integers(1, 300), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 900), st.integers(2, 300)), max_size=6),
)
def test_whatever_is_lowered_all_ranks_can_agree(sizes: dict[int, int], failures: list[tuple[int, int]]) -> None:
    """What failed is allowed no more, nothing grows, and a table takes over what another says."""
    table, other = LengthTable({**sizes}), LengthTable({**sizes})
    for length, size in failures:
        before = [table.size_for(length) for length in range(1, 900, 37)]
        table.lower(length, size)
        assert table.size_for(length) <= max(1, size)
        assert all(table.size_for(length) <= limit for length, limit in zip(range(1, 900, 37), before, strict=True))
    other.agree([min(pair) for pair in zip(table.values(), other.values(), strict=True)])
    assert other.values() == table.values()
    assert all(other.size_for(length) == table.size_for(length) for length in range(1, 900, 37))
