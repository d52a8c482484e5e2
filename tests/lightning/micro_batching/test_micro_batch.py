"""The largest micro-batch of each length, and a batch in the fewest micro-batches that fit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.errors import NotSplittable
from batchfinder.lightning.micro_batching.micro_batch import LengthTable, micro_batches, smaller

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
    assert table.values() == [3, 0]  # and none for lengths beyond the longest


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


SHORT_SIZES: dict[int | None, int] = {4: 9, 8: 4, 16: 2}


def padded(lengths: list[int], left: bool = False, width: int = 0) -> dict[str, torch.Tensor]:
    """One row of its own number for each length, with a mask."""
    width = max([*lengths, width])
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, slice(width - length, None) if left else slice(length)] = row + 1
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids.masked_fill(ids == 0, -100)}


@given(st.lists(st.integers(1, 16), min_size=1, max_size=24), st.integers(0, 20))
def test_sorted_by_length(lengths: list[int], width: int) -> None:
    """Each part has room at its own longest sample, is padded no further, and there cannot be fewer of them."""
    table = LengthTable(SHORT_SIZES)
    parts = micro_batches(padded(lengths, width=width), table, "tokens")
    places = [place for part in parts for place in part.positions]
    assert sorted(places) == list(range(len(lengths)))
    for part in parts:
        own = [lengths[place] for place in part.positions]
        assert part.batch["input_ids"].amax(1).tolist() == [place + 1 for place in part.positions]
        assert part.batch["input_ids"].size(1) == max(own) == part.seq_len
        assert part.samples <= table.size_for(max(own))
        assert part.factor == pytest.approx(sum(own) / sum(lengths))
    left_over, fewest = sorted(lengths, reverse=True), 0
    while left_over:
        left_over, fewest = left_over[table.size_for(left_over[0]) :], fewest + 1
    assert len(parts) == fewest


@given(st.lists(st.integers(1, 16), min_size=1, max_size=24))
def test_in_order(lengths: list[int]) -> None:
    """The fewest equal parts that the batch's padded length allows, each trimmed to its own longest."""
    parts = micro_batches(padded(lengths), LengthTable(SHORT_SIZES), "samples", in_order=True)
    assert [place for part in parts for place in part.positions] == list(range(len(lengths)))
    sizes = [part.samples for part in parts]
    assert len(parts) == math.ceil(len(lengths) / LengthTable(SHORT_SIZES).size_for(max(lengths)))
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        assert part.batch["input_ids"].size(1) == max(lengths[place] for place in part.positions)
    assert [part.share for part in parts] == pytest.approx([part.factor for part in parts])


def test_a_batch_that_fits_is_the_batch_itself() -> None:
    """In its own order, with nothing copied and nothing multiplied."""
    batch = padded([3, 8, 5])
    (part,) = micro_batches(batch, LengthTable(SHORT_SIZES), "tokens")
    assert part.batch["input_ids"] is batch["input_ids"]
    assert (part.factor, part.share, list(part.positions)) == (1.0, 1.0, [0, 1, 2])


@given(st.lists(st.integers(1, 16), min_size=1, max_size=24))
def test_padding_in_front_that_cannot_be_cut_off_counts(lengths: list[int]) -> None:
    """Without position_ids it may not be cut: sizes are those of the padded length, and all samples are there."""
    table = LengthTable(SHORT_SIZES)
    parts = micro_batches(padded(lengths, left=True), table, "samples")
    assert sorted(place for part in parts for place in part.positions) == list(range(len(lengths)))
    for part in parts:
        assert part.samples <= table.size_for(part.batch["input_ids"].size(1))
        assert part.batch["input_ids"].amax(1).tolist() == [place + 1 for place in part.positions]


def test_pictures_have_one_size() -> None:
    """No lengths: equal parts in order."""
    batch = (torch.arange(7.0).view(7, 1, 1, 1), torch.arange(7))
    parts = micro_batches(batch, LengthTable({None: 3}), "samples")
    assert [part.samples for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part.batch[1] for part in parts]), batch[1])
    assert [part.factor for part in parts] == [3 / 7, 2 / 7, 2 / 7]


def test_a_sum_is_logged_by_samples() -> None:
    """Each loss counts once, and each logged mean by its samples."""
    parts = micro_batches(padded([4] * 12), LengthTable(SHORT_SIZES), "sum")
    assert [part.factor for part in parts] == [1.0, 1.0]
    assert [part.share for part in parts] == [9 / 12, 3 / 12]


def test_a_batch_of_nothing_that_has_rows_is_refused() -> None:
    """With the next move."""
    with pytest.raises(NotSplittable):
        micro_batches({"x": torch.tensor(1.0)}, LengthTable({None: 3}), "samples")
