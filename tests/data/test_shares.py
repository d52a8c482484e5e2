"""A loop of one's own gets the fewest micro-batches that fit, each trimmed and with its share of the loss."""

from __future__ import annotations

import doctest

import pytest
import torch

from batchfinder import split_batch
from batchfinder.data import split
from batchfinder.data.padding import padded_length
from batchfinder.errors import InvalidValue
from tests.data.nets import Reader, text


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
    assert doctest.testmod(split).attempted > 0
    assert doctest.testmod(split).failed == 0


def test_no_room():
    """Micro-batches of nothing are refused."""
    with pytest.raises(InvalidValue, match="largest: 0 will not do; expected 1 or more"):
        split_batch(torch.ones(3), 0)
