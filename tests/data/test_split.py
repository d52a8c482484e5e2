"""A batch is split into parts of its own make, in order, without copying; put together they are the batch."""

from __future__ import annotations

import collections
import doctest
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from transformers import BatchEncoding, PreTrainedTokenizerFast

from batchfinder import split_batch
from batchfinder.data import split as split_module
from batchfinder.data.batch import children
from batchfinder.data.padding import padded_length
from batchfinder.data.split import equal_sizes, reorder, split, with_batch_size
from batchfinder.errors import InvalidValue, NotSplittable
from tests.data.containers import Pair, Record
from tests.data.nets import Reader, text


def batches(samples):
    """A batch of these samples in every make: what it would have been, had the loader made it of them alone."""
    count, ids = len(samples), torch.tensor(samples)
    x = 3 * ids[:, None] + torch.arange(3.0)
    return [
        x,
        [x, ids],
        (x, ids, torch.ones(40)),
        Pair(x, [list(samples), tuple(map(str, samples))]),
        Record(x, Record(ids, "text")),
        {"a": x, "b": {"c": list(map(str, samples)), "scale": torch.tensor(2.0), "none": None}},
        collections.OrderedDict(a=x, b=np.array(samples)),
        MappingProxyType({"a": x}),
        BatchEncoding({"input_ids": ids[:, None]}),
        {
            "images": [torch.full((3, 2, 2), float(i)) for i in samples],
            "targets": [{"k": torch.ones(i)} for i in samples],
        },
        {"table": torch.ones(40, 2), "a": x, "ids": torch.arange(4)[None]},
        torch.sparse_coo_tensor(
            torch.stack([torch.arange(count), ids]), torch.ones(count), (count, 30), check_invariants=True
        ),
        torch.nested.as_nested_tensor([torch.full((i + 1,), float(i)) for i in samples], layout=torch.jagged),
    ]


def same(one, other):
    """Whether two batches are of the same types and hold the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.is_nested:
            return all(torch.equal(a, b) for a, b in zip(one.unbind(), other.unbind(), strict=True))
        return one.dtype == other.dtype and torch.equal(one.to_dense(), other.to_dense())
    inside, other_inside = children(one), children(other)
    if inside is None:
        return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    return [key for key, _ in inside] == [key for key, _ in other_inside] and all(
        same(a, b) for (_, a), (_, b) in zip(inside, other_inside, strict=True)
    )


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_parts_are_batches(sizes, random):
    """Each part is the batch that a loader would have made of its samples alone, in any order and of any make."""
    samples = random.sample(range(25), sum(sizes))
    order = random.sample(range(len(samples)), len(samples))
    for index, batch in enumerate(batches(samples)):
        begin = 0
        for part, size in zip(split(batch, sizes), sizes, strict=True):
            assert same(part, batches(samples[begin : begin + size])[index])
            begin += size
        assert same(reorder(batch, order), batches([samples[place] for place in order])[index])
        assert same(batch, batches(samples)[index])


def test_views():
    """Tensors and arrays are not copied."""
    tensor, array = torch.zeros(5, 2), np.zeros(5)
    part = split({"a": tensor, "b": array}, [3, 2])[1]
    part["a"].fill_(1)
    part["b"][:] = 1
    assert tensor.sum() == 4
    assert array.sum() == 2


def test_packed():
    """A PackedSequence is taken apart by its samples, whatever their lengths and order."""
    sequences = [torch.arange(float(length)) for length in (2, 5, 1, 3)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    parts = split({"x": packed, "y": torch.arange(4)}, [1, 3])
    found = [sequence for part in parts for sequence in unpack_sequence(part["x"])]
    assert all(torch.equal(one, other) for one, other in zip(found, sequences, strict=True))


def test_encodings():
    """What a fast tokenizer keeps beside the tensors is split with them."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1, "[PAD]": 2}, "a")))
    tokenizer._tokenizer.pre_tokenizer = Whitespace()
    tokenizer.pad_token = "[PAD]"
    batch = tokenizer(["a", "a b", "b b b"], padding=True, return_tensors="pt")
    parts = split(batch, [1, 2])
    assert [part.tokens(0) for part in parts] == [batch.tokens(0), batch.tokens(1)]
    assert parts[1].word_ids(1) == batch.word_ids(2) == [0, 1, 2]
    assert reorder(batch, [2, 0, 1]).tokens(0) == batch.tokens(2)


@pytest.mark.parametrize("sizes", [[], [0, 4], [-1, 5]])
def test_sizes_that_cannot_be_meant(sizes):
    """No part at all, or one without samples."""
    with pytest.raises(InvalidValue) as caught:
        split(torch.ones(4), sizes)
    assert str(caught.value) == f"sizes: invalid value {sizes}; expected at least one, each 1 or more."


@pytest.mark.parametrize("batch", [torch.ones(4), {"a": [torch.ones(3), torch.ones(3)]}, ["a"], torch.tensor(5)])
def test_sizes_that_are_not_the_batchs(batch):
    """Sizes that add up to something that nothing in the batch has."""
    with pytest.raises(InvalidValue) as caught:
        split(batch, [2, 3])
    assert str(caught.value) == (
        "sizes: invalid value 5; expected as many samples as the batch has; nothing in it has so many rows or items."
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_layout_that_has_no_rows():
    """A tensor that cannot be cut by rows is named."""
    with pytest.raises(NotSplittable) as caught:
        split({"x": torch.eye(4).to_sparse_csr()}, [1, 3])
    assert caught.value.reason == "it holds a tensor of layout torch.sparse_csr, of which no rows can be taken"


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 400), st.integers(1, 50))
def test_equal_sizes(samples, largest):
    """All samples, in the fewest parts of at most the largest, larger ones first, differing by one at most."""
    sizes = equal_sizes(samples, largest)
    assert sum(sizes) == samples
    assert max(sizes) <= largest
    assert (len(sizes) - 1) * largest < samples
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_equal_sizes_of_nothing():
    """Neither no samples nor parts without any."""
    with pytest.raises(InvalidValue, match="samples: invalid value 0; expected 1 or more"):
        equal_sizes(0, 3)
    with pytest.raises(InvalidValue, match="largest: invalid value 0; expected 1 or more"):
        equal_sizes(3, 0)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 12))
def test_batch_size(have, want):
    """Tensors, texts and numbers that have one entry per sample are repeated or cut; all else stays."""
    batch = {
        "x": torch.arange(have * 2).reshape(have, 2),
        "text": [str(index) for index in range(have)],
        "number": list(range(have)),
        "scalar": torch.tensor(1.0),
        "other": torch.ones(have + 1),
    }
    resized = with_batch_size(batch, want)
    assert resized["x"].tolist() == [[index % have * 2, index % have * 2 + 1] for index in range(want)]
    assert resized["text"] == [str(index % have) for index in range(want)]
    assert resized["number"] == [index % have for index in range(want)]
    assert resized["scalar"] is batch["scalar"]
    assert resized["other"] is batch["other"]


def test_no_batch_size():
    """Nothing that tells how many samples there are gives no batch."""
    assert with_batch_size({"a": torch.tensor(1.0), "b": "text"}, 4) is None


def test_batch_size_beside_a_table():
    """The samples are counted as for a split: a table of weights that comes first is not taken for them."""
    batch = {"weights": torch.ones(10), "input_ids": torch.ones(2, 5).long(), "images": [torch.ones(3, 4, 4)] * 2}
    resized = with_batch_size(batch, 3)
    assert [len(part) for part in resized.values()] == [10, 3, 3]


def test_a_loop():
    """Accumulated as the docstring says, the gradients are the whole batch's."""
    model, batch = Reader(), text([9, 4, 3, 1, 7, 2, 5], 10, ignored=1)
    model.token_mean(batch).backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    parts = split_batch(batch, 3, "tokens")
    assert [(len(part["input_ids"]), padded_length(part)) for part, _ in parts] == [(3, 9), (2, 7), (2, 5)]
    for part, factor in parts:
        (model.token_mean(part) * factor).backward()
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-12)


def test_nothing_counts():
    """A micro-batch of which nothing counts is left out, with its NaN."""
    batch = text([5, 5, 1, 1], 5, ignored=1)
    parts = split_batch(batch, 2, "tokens")
    assert [factor for _, factor in parts] == [1]
    assert torch.equal(parts[0][0]["input_ids"], batch["input_ids"][:2])


def test_docstring():
    """The example in the docstring is right."""
    assert doctest.testmod(split_module).attempted > 0
    assert doctest.testmod(split_module).failed == 0


def test_no_room():
    """Micro-batches of nothing are refused."""
    with pytest.raises(InvalidValue, match="largest: invalid value 0; expected 1 or more"):
        split_batch(torch.ones(3), 0)
