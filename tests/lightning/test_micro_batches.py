"""A batch in micro-batches: all samples once, none too many at its length, as few as can be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.errors import NotSplittable
from batchfinder.lightning.micro_batching.micro_batch import LengthTable, micro_batches

SIZES: dict[int | None, int] = {4: 9, 8: 4, 16: 2}


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
    table = LengthTable(SIZES)
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
    parts = micro_batches(padded(lengths), LengthTable(SIZES), "samples", in_order=True)
    assert [place for part in parts for place in part.positions] == list(range(len(lengths)))
    sizes = [part.samples for part in parts]
    assert len(parts) == math.ceil(len(lengths) / LengthTable(SIZES).size_for(max(lengths)))
    assert max(sizes) - min(sizes) <= 1
    for part in parts:
        assert part.batch["input_ids"].size(1) == max(lengths[place] for place in part.positions)
    assert [part.share for part in parts] == pytest.approx([part.factor for part in parts])


def test_a_batch_that_fits_is_the_batch_itself() -> None:
    """In its own order, with nothing copied and nothing multiplied."""
    batch = padded([3, 8, 5])
    (part,) = micro_batches(batch, LengthTable(SIZES), "tokens")
    assert part.batch["input_ids"] is batch["input_ids"]
    assert (part.factor, part.share, list(part.positions)) == (1.0, 1.0, [0, 1, 2])


@given(st.lists(st.integers(1, 16), min_size=1, max_size=24))
def test_padding_in_front_that_cannot_be_cut_off_counts(lengths: list[int]) -> None:
    """Without position_ids it may not be cut: sizes are those of the padded length, and all samples are there."""
    table = LengthTable(SIZES)
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
    parts = micro_batches(padded([4] * 12), LengthTable(SIZES), "sum")
    assert [part.factor for part in parts] == [1.0, 1.0]
    assert [part.share for part in parts] == [9 / 12, 3 / 12]


def test_a_batch_of_nothing_that_has_rows_is_refused() -> None:
    """With the next move."""
    with pytest.raises(NotSplittable):
        micro_batches({"x": torch.tensor(1.0)}, LengthTable({None: 3}), "samples")
