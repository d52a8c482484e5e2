"""Lengths of samples as their mask shows them, and batches of any make in another order."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from batchfinder.data.padding import sample_lengths
from batchfinder.data.split import reorder

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
