"""The samples of a batch are counted where its parts agree; where nobody can tell, that is said."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from batchfinder.data.batch import Layout, samples_in
from batchfinder.errors import NotSplittable

MOVE = (
    "Return a batch from collate_fn whose tensors have the samples along their first dimension, or split it yourself."
)


class Pair(NamedTuple):
    """A batch by position and name."""

    one: Any
    two: Any


@dataclasses.dataclass
class Record:
    """A batch by field."""

    one: Any
    two: Any


def boxes(count):
    """What detection has for each image: any number of boxes."""
    return [{"boxes": torch.ones(index, 4), "labels": torch.ones(index)} for index in range(count)]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(2, 12))
def test_every_make(n):
    """Whatever a batch is made of, and whatever is in it that belongs to no sample."""
    x, y = torch.ones(n, 3), torch.ones(n)
    for batch in (
        x,
        [x, y],
        (x, y),
        {"a": x, "b": {"c": y}},
        Pair(x, {"y": y}),
        Record(x, [y]),
        BatchEncoding({"input_ids": torch.ones(n, 5).long()}),
        MappingProxyType({"x": x}),
        {"x": x, "names": ["a"] * n, "scale": torch.tensor(2.0), "name": "b", "more": None, "rate": 0.1},
        (x, ("a",) * n),
        {"a": x, "positions": torch.arange(5)[None]},
        {"images": [torch.ones(3, 4, size + 1) for size in range(n)], "targets": boxes(n)},
        ([torch.ones(3, 4, 4)] * n, boxes(n)),
        {"x": np.ones((n, 2))},
        ["a"] * n,
        {"input_ids": torch.ones(n, 5).long(), "causal_mask": torch.ones(13, 13), "weights": torch.ones(20)},
        (x, y, torch.ones(20)),
        pack_sequence([torch.arange(n - index) for index in range(n)]),
    ):
        assert samples_in(batch) == n, batch


def test_one_sample():
    """A batch of one has one, though everything in it has one row."""
    assert samples_in({"x": torch.ones(1, 3), "y": torch.ones(1)}) == 1


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (
            [torch.ones(8, 3, 2, 2), torch.ones(37, 4), torch.ones(37)],
            "nobody can tell how many samples it has: the first dimensions of what it holds are 8 ([0]), 37 ([1]), 37"
            " ([2])",
        ),
        (
            {"weights": torch.ones(10), "a": {"b": torch.ones(8)}},
            "nobody can tell how many samples it has: the first dimensions of what it holds are 10 (['weights']), 8"
            " (['a']['b'])",
        ),
        ({"rate": 1}, "it holds no tensors, arrays or lists"),
        ("text", "it holds no tensors, arrays or lists"),
    ],
)
def test_nobody_can_tell(batch, reason):
    """Where the parts do not agree, their sizes are named and the next move; nothing is guessed."""
    with pytest.raises(NotSplittable) as caught:
        samples_in(batch)
    assert caught.value.reason == reason
    assert str(caught.value) == f"the batch cannot be split: {reason}. {MOVE}"


def test_a_table_that_is_known():
    """What earlier batches have shown to belong to no sample is not asked."""
    layout = Layout()
    layout.learn({"weights": torch.ones(10), "a": torch.ones(8)}, 8)
    assert samples_in({"weights": torch.ones(10), "a": torch.ones(6)}, layout) == 6
