"""The sequence is found by what varies, then by name, and stretched to any length; doubt is put in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.data.sequence_dim import SequenceDims, cycle, find_sequence


def tokens(length: int, batch: int = 3, **more: Any) -> dict[str, Any]:
    """A batch as a tokenizer pads it."""
    return {
        "input_ids": torch.arange(length).repeat(batch, 1),
        "attention_mask": torch.ones(batch, length, dtype=torch.long),
        "mask": torch.zeros(batch, length, length),
        "labels": torch.zeros(batch, dtype=torch.long),
        **more,
    }


def shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """Each tensor's shape, by name."""
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(3, 9), st.integers(1, 2), st.integers(1, 20), st.integers(-1, 1))
def test_what_varies(long, short, seq_len, offset):
    """Whatever varies with the length, masks (B, S) and (B, S, S) and vectors one longer or shorter too, follows it."""

    def batch(length: int) -> Any:
        lengths = torch.full((3,), length)
        return tokens(length, shifted=torch.ones(3, length + offset, 5), n=lengths, classes=torch.ones(3, 7))

    found = find_sequence(batch(long), batch(short))
    assert isinstance(found, SequenceDims)
    assert found.length == long
    stretched = found.stretch(batch(long), seq_len)
    assert shapes(stretched) == {
        "input_ids": (3, seq_len),
        "attention_mask": (3, seq_len),
        "mask": (3, seq_len, seq_len),
        "labels": (3,),
        "shifted": (3, max(1, seq_len + offset), 5),
        "n": (3,),
        "classes": (3, 7),
    }
    assert stretched["n"].tolist() == [seq_len] * 3
    assert stretched["input_ids"][0].tolist() == [index % long for index in range(seq_len)]


def test_by_name():
    """Where all is padded alike the length is that of input_ids: integers and masks follow it wherever they have it."""
    batch = tokens(
        6, hidden=torch.ones(3, 6, 6), labels2=torch.ones(3, 6, dtype=torch.long), lens=torch.tensor([6, 2, 1])
    )
    found = find_sequence(batch, batch, guess=False)
    assert isinstance(found, SequenceDims)
    assert found.length == 6
    assert shapes(found.stretch(batch, 9)) == {
        "input_ids": (3, 9),
        "attention_mask": (3, 9),
        "mask": (3, 9, 9),
        "labels": (3,),
        "hidden": (3, 9, 6),
        "labels2": (3, 9),
        "lens": (3,),
    }
    assert found.stretch(batch, 4)["lens"].tolist() == [4, 4, 4]


def test_by_guess():
    """Integers of any name may be tokens, but only for those who ask for a length."""
    batch = [torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6)]
    found = find_sequence(batch, batch)
    assert isinstance(found, SequenceDims)
    assert [tuple(tensor.shape) for tensor in found.stretch(batch, 8)] == [(3, 8), (3, 8)]
    assert find_sequence(batch, batch, guess=False) == (
        "no length varies between samples, and no two-dimensional integer tensor could hold tokens"
    )


def test_images():
    """Square images that vary in size follow one length, their side."""
    found = find_sequence(torch.ones(2, 3, 32, 32), torch.ones(2, 3, 16, 16))
    assert isinstance(found, SequenceDims)
    assert found.length == 32
    assert found.stretch(torch.ones(2, 3, 32, 32), 48).shape == (2, 3, 48, 48)


@pytest.mark.parametrize(
    ("long", "short", "doubt"),
    [
        (
            {"input_ids": torch.ones(2, 9), "labels": torch.ones(2, 7)},
            {"input_ids": torch.ones(2, 4), "labels": torch.ones(2, 5)},
            "dimension 1 of batch['input_ids'] and dimension 1 of batch['labels'] vary independently",
        ),
        (
            torch.ones(2, 3, 20, 30),
            torch.ones(2, 3, 10, 10),
            "dimension 2 of the batch and dimension 3 of the batch vary independently",
        ),
        (
            torch.ones(9, 4),
            torch.ones(4, 4),
            "their first dimension, which should be the batch, grows with the samples' lengths",
        ),
        (torch.ones(2, 3), torch.ones(2, 3, 1), "long and short samples make batches of different structure"),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, "long and short samples make batches of different structure"),
        (["text"], ["text"], "they hold no tensors"),
        (
            [torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)],
            [torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)],
            "tensors that could hold tokens have the lengths 3, 4",
        ),
        (
            torch.ones(2, 3, 8, 8),
            torch.ones(2, 3, 8, 8),
            "no length varies between samples, and no two-dimensional integer tensor could hold tokens",
        ),
    ],
)
def test_doubt(long, short, doubt):
    """Where a length would be ambiguous, the answer says why."""
    assert find_sequence(long, short) == doubt


def test_cycle_keeps_what_fits():
    """A tensor that has the size is not copied."""
    tensor = torch.ones(2, 3)
    assert cycle(tensor, 3, 1) is tensor
