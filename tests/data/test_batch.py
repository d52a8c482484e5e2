"""The leaves of a batch, the number of its samples, and which of its parts follow them."""

from __future__ import annotations

import collections
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from batchfinder.data.batch import Layout, is_alike, leaves, map_leaves, samples_in, size_of, tensors
from batchfinder.data.split import split
from batchfinder.errors import NotSplittable
from tests.data.containers import Pair, Record

X = torch.arange(4)
PACKED = pack_sequence([X, X[:2]])

BATCHES = [
    X,
    [X, "text", 3],
    (X, {"a": [X, None]}),
    Pair(X, [1, 2]),
    Record(X, Record(X)),
    {"a": X, "b": {"c": "text"}},
    collections.OrderedDict(a=X),
    BatchEncoding({"input_ids": X}),
    MappingProxyType({"a": X}),
    [["a", "b"], (1, 2.5)],
    PACKED,
    "text",
    None,
    [],
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_rebuilt(batch):
    """A batch rebuilt with the leaves it has is of the same type and content; with others, only the copy has them."""
    same = map_leaves(lambda path, leaf: leaf, batch)
    assert type(same) is type(batch)
    assert [(path, id(leaf)) for path, leaf in leaves(same)] == [(path, id(leaf)) for path, leaf in leaves(batch)]
    before = list(leaves(batch))
    other = map_leaves(lambda path, leaf: path, batch)
    assert type(other) is type(batch) or before[0][0] == ()
    assert all(one[1] is two[1] for one, two in zip(before, leaves(batch), strict=True))


def test_paths():
    """A leaf's path is the keys, fields and positions that lead to it."""
    batch = {"a": Pair(X, [X, [1, 2]]), "b": Record(["x", "y"], X)}
    assert [path for path, _ in leaves(batch)] == [
        ("a", "one"),
        ("a", "two", 0),
        ("a", "two", 1),
        ("b", "one"),
        ("b", "two"),
    ]
    assert [path for path, _ in tensors(batch)] == [("a", "one"), ("a", "two", 0), ("b", "two")]


def test_packed_sequence_is_one_thing():
    """A PackedSequence is not taken apart: its tensors make sense only together."""
    assert list(leaves(PACKED)) == [((), PACKED)]


MOVE = (
    "Return a batch from collate_fn whose tensors have the samples along their first dimension, or split it yourself."
)


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
            "its number of samples is not clear: the first dimensions of its parts are 8 ([0]), 37 ([1]), 37 ([2])",
        ),
        (
            {"weights": torch.ones(10), "a": {"b": torch.ones(8)}},
            "its number of samples is not clear: the first dimensions of its parts are 10 (['weights']), 8"
            " (['a']['b'])",
        ),
        ({"rate": 1}, "it holds no tensors, arrays or lists"),
        ("text", "it holds no tensors, arrays or lists"),
    ],
)
def test_parts_that_disagree(batch, reason):
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


def images(count, channels=3):
    """Images of one size, not stacked."""
    return [torch.arange(channels * 4.0).view(channels, 2, 2) + 100 * index for index in range(count)]


@pytest.mark.parametrize(
    ("value", "samples", "reading"),
    [
        (torch.ones(4, 2), 4, "rows"),
        (torch.ones(4, 2), 3, "whole"),
        (torch.tensor(4.0), 4, "whole"),
        (np.ones((4, 2)), 4, "rows"),
        (["a", "b"], 2, "rows"),
        (["a", "b"], 3, "whole"),
        ([1, 2], 2, "rows"),
        ((224, 224), 3, "whole"),
        (("a", "b"), 2, "items"),
        ("ab", 2, "whole"),
        (None, 2, "whole"),
        ([torch.ones(3), torch.ones(5)], 2, "items"),
        ([{"a": torch.ones(3)}, {"a": torch.ones(5)}], 2, "items"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(5)}], 2, "inside"),  # fields of two kinds
        ([torch.ones(2, 5), torch.ones(2)], 2, "inside"),
        ([torch.ones(2, 5), torch.ones(2, 5)], 2, "inside"),
        (Pair(torch.ones(3), torch.ones(5)), 2, "inside"),
        ({"a": torch.ones(2)}, 1, "inside"),
        (pack_sequence([torch.arange(4), torch.arange(2)]), 2, "rows"),
        ([], 0, "inside"),
    ],
)
def test_read(value, samples, reading):
    """Rows where there are as many as samples, items where a list of one kind has as many, the rest as it is."""
    assert Layout().read(value, ("part",), samples) == reading


def test_images():
    """Three images of three channels are three samples in a container, and fields at the top."""
    assert Layout().read(images(3), ("images",), 3) == "items"
    assert Layout().read(images(3), (), 3) == "inside"


def test_what_another_batch_has_told():
    """A table as long as the batch, and a list as long as its tensors, are known from a batch of another size."""
    layout = Layout()

    def batch(samples):
        crops = [torch.arange(2.0 * samples).view(samples, 2) for _ in range(4)]
        words = [torch.arange(4.0) for _ in range(samples)]
        return {"x": torch.ones(samples, 2), "weights": torch.ones(4), "words": words, "crops": crops}

    first = split(batch(4), [1, 3], layout)[0]  # ambiguous
    assert (len(first["weights"]), len(first["words"]), first["words"][0].shape) == (1, 4, (1,))
    split(batch(7), [3, 4], layout)
    again = split(batch(4), [1, 3], layout)[0]
    assert (len(again["weights"]), len(again["words"]), again["words"][0].shape) == (4, 1, (4,))
    assert [crop.shape for crop in again["crops"]] == [(1, 2)] * 4


def test_images_are_not_learned_as_tables():
    """A batch of three images teaches nothing wrong for the batches that come after it."""
    layout = Layout()
    for samples in (3, 5, 3):
        parts = split({"images": images(samples), "labels": torch.arange(samples)}, [1, samples - 1], layout)
        assert [len(part["images"]) for part in parts] == [1, samples - 1]
        assert torch.equal(parts[1]["images"][0], images(samples)[1])


@pytest.mark.parametrize(
    ("value", "alike"),
    [
        ([torch.ones(3), torch.ones(5)], True),
        ([torch.ones(3), torch.ones(3, 1)], False),
        ([torch.ones(3), torch.ones(3).long()], False),
        ([{"a": 1}, {"a": 2}], True),
        ([{"a": 1}, {"b": 2}], False),
        (["a", "b"], True),
        (["a", 1], False),
        (Pair(torch.ones(3), torch.ones(3)), False),
        ([], False),
    ],
)
def test_alike(value, alike):
    """Items of one kind, rank and type, or with the same keys."""
    assert is_alike(value) is alike


def test_size():
    """Rows of what has rows; None of what has none."""
    leaves = (torch.ones(2, 3), torch.tensor(1), np.ones(4), np.float64(1), ["a"] * 5, (1, 2), "abc", None, 3)
    assert [size_of(leaf) for leaf in leaves] == [2, None, 4, None, 5, 2, None, None, None]
    assert size_of(pack_sequence([torch.arange(4), torch.arange(2), torch.arange(1)])) == 3
