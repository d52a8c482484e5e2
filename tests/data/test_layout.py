"""Which parts of a batch follow its samples; what one batch cannot tell, another one with other sizes does."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from batchfinder.data.batch import Layout, is_alike, size_of
from batchfinder.data.split import split


class Pair(NamedTuple):
    """A batch by position and name."""

    one: torch.Tensor
    two: torch.Tensor


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

    first = split(batch(4), [1, 3], layout)[0]  # nobody can tell
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
