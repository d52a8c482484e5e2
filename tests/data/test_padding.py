"""The padded length, trimming, and the lengths of the samples."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from batchfinder.data.padding import padded_length, sample_lengths, trim
from batchfinder.data.sequence_dim import find_sequence
from batchfinder.data.split import reorder

PAD = 9


def padded(lengths, width, left=False, **more: Any):
    """A batch as a collator pads it: token k of sample s is 10 s + k."""
    places = torch.arange(width) - (torch.tensor([[width - length] for length in lengths]) if left else 0)
    seen = (places >= 0) & (places < torch.tensor(lengths)[:, None])
    tokens = 10 * torch.arange(len(lengths))[:, None] + places
    return {
        "input_ids": torch.where(seen, tokens, PAD),
        "attention_mask": seen.long(),
        "token_type_ids": torch.zeros_like(tokens),
        "labels": torch.where(seen, tokens, -100),
        **more,
    }


def equal(one, other):
    """Whether two batches hold the same tensors."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 5))
def test_padding_behind(lengths, more):
    """A batch that is padded further than its longest sample becomes the one that is padded to it."""
    width = max(lengths) + more
    trimmed = trim(padded(lengths, width))
    assert equal(trimmed, padded(lengths, max(lengths)))
    assert padded_length(trimmed) == max(lengths)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 5))
def test_padding_in_front(lengths, more):
    """In front it is cut where positions are given with the tokens, and stays where the model counts them itself."""
    width = max(lengths) + more

    def batch(width):
        found = padded(lengths, width, left=True)
        del found["labels"]
        return found | {"position_ids": found["attention_mask"].cumsum(1)}

    assert equal(trim(batch(width)), batch(max(lengths)))
    alone = padded(lengths, width, left=True)
    assert trim(alone) is alone


def test_first_labels_that_count():
    """Padding in front stays where a sample's first label counts, which a causal model would tell from the padding."""
    batch = padded([2, 3], 5, left=True)
    batch["position_ids"] = batch["attention_mask"].cumsum(1)
    assert trim(batch) is batch
    batch["labels"] = torch.tensor([[-100, -100, -100, -100, 1], [-100, -100, -100, 1, 2]])
    assert padded_length(trim(batch)) == 3
    batch["labels"] = torch.tensor([[-100, -100, -100, 1, 1], [-100, -100, -100, 1, 2]])
    assert trim(batch) is batch


def test_masks_of_more_dimensions():
    """Masks and biases over pairs of tokens are cut in both dimensions, whatever heads there are."""
    masks = {
        "causal_mask": torch.ones(2, 1, 6, 6),
        "attention_bias": torch.ones(2, 6, 6, 6),
        "pair_mask": torch.ones(2, 6, 6),
    }
    trimmed = trim(padded([3, 4], 6, **masks, inputs_embeds=torch.ones(2, 6, 6)))
    shapes = {name: tuple(trimmed[name].shape) for name in (*masks, "inputs_embeds")}
    assert shapes == {
        "causal_mask": (2, 1, 4, 4),
        "attention_bias": (2, 6, 4, 4),
        "pair_mask": (2, 4, 4),
        "inputs_embeds": (2, 4, 6),
    }


@pytest.mark.parametrize(
    "more",
    [
        {"features": torch.ones(2, 6)},
        {"features": torch.zeros(2, 6)},
        {"tags": torch.zeros(2, 6).long()},
        {"labels": torch.tensor([[1, 2, -100, -100, -100, -100], [1, 2, 3, -100, -100, 7]])},
        {"labels": torch.full((2, 6, 3), -100)},
        {"input_features": torch.zeros(2, 8, 6)},
        {"attention_mask": torch.zeros(2, 6)},
        {"attention_mask": torch.tensor([[0, 0, 0, -1e4, -1e4, -1e4]] * 2)},
        {"input_ids": torch.ones(2, 4).long(), "token_type_ids": torch.ones(2, 4).long()},
    ],
    ids=["floats", "zeros", "integers", "labels", "3-d labels", "behind", "no token at all", "added", "mask alone"],
)
def test_not_sure(more):
    """Nothing is cut where something else is as long, or a label counts where no token is."""
    batch = padded([2, 3], 6) | more
    assert trim(batch) is batch


def test_what_is_not_as_long():
    """What has another length stays, sample's labels and images among it; tensors are views, the make stays."""
    batch = BatchEncoding(padded([2, 3], 6, pixel_values=torch.ones(2, 3, 8, 8), choice=torch.tensor([0, 1])))
    trimmed = trim(batch)
    assert type(trimmed) is BatchEncoding
    assert trimmed["pixel_values"].shape == (2, 3, 8, 8)
    assert trimmed["choice"] is batch["choice"]
    assert trimmed["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
    assert batch["input_ids"].shape == (2, 6)


def test_source_and_target():
    """Each mask is for the tensors with its prefix, and a decoder's for the labels."""
    source, target = padded([2, 3], 6), padded([4, 1], 6)
    batch = {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "decoder_input_ids": target["input_ids"],
        "decoder_attention_mask": target["attention_mask"],
        "labels": target["labels"],
    }
    assert {name: tensor.size(1) for name, tensor in trim(batch).items()} == {
        "input_ids": 3,
        "attention_mask": 3,
        "decoder_input_ids": 4,
        "decoder_attention_mask": 4,
        "labels": 4,
    }
    del batch["decoder_attention_mask"]
    sizes = {name: tensor.size(1) for name, tensor in trim(batch).items()}
    assert sizes == {"input_ids": 3, "attention_mask": 3, "decoder_input_ids": 6, "labels": 6}


def test_pairs():
    """Masks with suffixes, or in containers of their own, are for what they stand beside."""
    chosen, rejected = padded([2, 3], 6), padded([5, 1], 6)
    flat = {f"{name}_a": tensor for name, tensor in chosen.items()} | {f"{name}_b": t for name, t in rejected.items()}
    trimmed = trim(flat)
    assert equal({name[:-2]: tensor for name, tensor in trimmed.items() if name.endswith("_a")}, padded([2, 3], 3))
    assert equal({name[:-2]: tensor for name, tensor in trimmed.items() if name.endswith("_b")}, padded([5, 1], 5))
    nested = trim({"a": chosen, "b": rejected})
    assert equal(nested["a"], padded([2, 3], 3))
    assert equal(nested["b"], padded([5, 1], 5))


@pytest.mark.parametrize(("multiple_of", "left"), [(1, 5), (2, 6), (4, 8), (8, 8), (16, 11)])
def test_multiples(multiple_of, left):
    """A length that the number divides is left, where the batch has as much."""
    batch = padded([5, 2], 11)
    assert padded_length(trim(batch, multiple_of=multiple_of)) == left
    front = padded([5, 2], 11, left=True)
    front["position_ids"] = front["attention_mask"].cumsum(1)
    del front["labels"]
    trimmed = trim(front, multiple_of=multiple_of)
    assert padded_length(trimmed) == left
    assert torch.equal(trimmed["input_ids"], front["input_ids"][:, 11 - left :])


def test_padded_length():
    """By the usual names, by a mask, or by where batches of other lengths have shown the sequence to be."""
    assert padded_length(padded([2, 3], 6)) == 6
    assert padded_length({"inputs_embeds": torch.ones(2, 6, 4), "attention_mask": torch.ones(2, 6)}) == 6
    assert padded_length([torch.ones(2, 6).long(), torch.ones(2).long()]) is None
    assert padded_length({"pixel_values": torch.ones(2, 3, 8, 8)}) is None

    def pair(length):
        return [torch.ones(2, length).long(), torch.ones(2, length + 1).long()]

    sequence = find_sequence(pair(9), pair(4))
    assert not isinstance(sequence, str)
    assert [padded_length(pair(length), sequence) for length in (1, 4, 12)] == [1, 4, 12]
    assert padded_length([torch.ones(2)], sequence) is None


Pair = namedtuple("Pair", "rows names")


@dataclass
class Held:
    """A batch as a dataclass."""

    rows: torch.Tensor
    scale: float


def mask(*rows: str) -> dict[str, torch.Tensor]:
    """A batch whose mask is drawn."""
    return {"attention_mask": torch.tensor([[int(letter) for letter in row] for row in rows])}


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        (mask("1110", "1000", "1111"), [3, 1, 4]),
        (mask("0111", "0001", "1111"), [3, 1, 4]),
        (mask("1110", "1100"), [3, 2]),
        (mask("0011", "0111"), [2, 3]),
        (mask("1111", "1111"), [4, 4]),
        (mask("1010", "1000"), [3, 1]),
        (mask("0000", "1110"), [1, 3]),
        (mask("0110", "1111"), None),
        (mask("0011", "1100"), None),
        ({"input_ids": torch.ones(2, 3)}, None),
        ({"a": mask("11"), "b": mask("11")}, None),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, None),
        ({"x": mask("110", "111")}, [2, 3]),
    ],
)
def test_lengths(batch: Any, lengths: list[int] | None) -> None:
    """All up to the last token, or from the first where padding is on the left; None where it is on both sides."""
    assert sample_lengths(batch) == lengths


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.arange(3), torch.tensor([2, 0, 1])),
        ([torch.arange(3), ["a", "b", "c"]], [torch.tensor([2, 0, 1]), ["c", "a", "b"]]),
        ((torch.arange(3), 7, None, "text"), (torch.tensor([2, 0, 1]), 7, None, "text")),
        ({"x": torch.arange(3), "table": torch.arange(5)}, {"x": torch.tensor([2, 0, 1]), "table": torch.arange(5)}),
        (Pair(torch.arange(3), ["a", "b", "c"]), Pair(torch.tensor([2, 0, 1]), ["c", "a", "b"])),
        (Held(torch.arange(3), 0.5), Held(torch.tensor([2, 0, 1]), 0.5)),
        ({"n": np.arange(3)}, {"n": np.array([2, 0, 1])}),
        ({"x": torch.arange(3).to_sparse()}, {"x": torch.tensor([2, 0, 1])}),
        ([{"a": torch.ones(2)}, {"a": torch.zeros(2)}, {"a": torch.full((2,), 5.0)}], None),
    ],
    ids=["tensor", "fields", "others", "table", "namedtuple", "dataclass", "array", "sparse", "items"],
)
def test_reorder(batch: Any, expected: Any) -> None:
    """Rows and items move, what has none stays, types are kept, the batch itself is unchanged."""
    before = repr(batch)
    made = reorder(batch, [2, 0, 1])
    assert type(made) is type(batch)
    assert repr(batch) == before
    if expected is None:
        assert [float(item["a"][0]) for item in made] == [5.0, 1.0, 0.0]
    elif isinstance(made, dict) and "x" in made and made["x"].is_sparse:
        assert torch.equal(made["x"].to_dense(), expected["x"])
    else:
        assert repr(made) == repr(expected)


def test_the_encodings_of_a_batch_move_along() -> None:
    """As a tokenizer returns them beside the tensors."""
    batch = BatchEncoding({"input_ids": torch.arange(3)})
    batch._encodings = ["first", "second", "third"]
    made = reorder(batch, [2, 0, 1])
    assert isinstance(made, BatchEncoding)
    assert made["input_ids"].tolist() == [2, 0, 1]
    assert made._encodings == ["third", "first", "second"]
    assert batch._encodings == ["first", "second", "third"]
