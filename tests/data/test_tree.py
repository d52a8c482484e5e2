"""Batches of any make are walked through and rebuilt, the original left as it was."""

from __future__ import annotations

import collections
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from batchfinder.data.batch import leaves, map_leaves, tensors
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
