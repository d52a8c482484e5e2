"""A few of the user's samples are read, spread over the data, and nothing of the user's is moved on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler

from batchfinder.data.longest_samples import UnreadableData, read_batches, read_samples, spread
from tests.lightning.tiny import Rows, Stream


def numbers(rows: Any) -> list[int]:
    """The rows' numbers."""
    return [int(row[0]) for row in rows]


def test_spread():
    """Positions are distinct, in order, from the first, and no further apart than they must be."""
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(3, 32) == [0, 1, 2]
    assert spread(0, 4) == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_indexed(shuffle):
    """A dataset that can be indexed is read all over."""
    assert numbers(read_samples(DataLoader(Rows(100), shuffle=shuffle), 5)) == [0, 20, 40, 60, 80]


def test_subset():
    """Of a subset only its own samples are read."""
    loader = DataLoader(Rows(100), sampler=SubsetRandomSampler(range(50, 60)))
    assert numbers(read_samples(loader, 5)) == [50, 52, 54, 56, 58]


class Moving(Sampler[Any]):
    """Shuffles its own list with generators of every kind."""

    def __init__(self, rows: int) -> None:
        self.order = list(range(rows))
        self.generator = torch.Generator().manual_seed(1)
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.inner = RandomSampler(range(rows), generator=self.generator)

    def __iter__(self) -> Any:
        self.python.shuffle(self.order)
        first = int(torch.randint(100, (), generator=self.generator)) + int(self.numpy.integers(100))
        return iter([self.order[first % len(self.order)], *self.inner])

    def __len__(self) -> int:
        return len(self.order)


@pytest.mark.parametrize("batched", [False, True])
def test_custom_samplers_stay_where_they_are(batched):
    """A sampler of the user's own is read from a copy: what it yields afterwards is what it would have yielded."""
    read, unread = Moving(20), Moving(20)

    def loader(sampler: Any) -> Any:
        if batched:
            return DataLoader(Rows(20), batch_sampler=BatchSampler(sampler, 4, False))
        return DataLoader(Rows(20), sampler=sampler, batch_size=None)

    found = read_samples(loader(read), 8) if batched else read_batches(loader(read), 8)
    assert len(set(numbers(found))) > 2
    assert list(read) == list(unread)


def test_stream():
    """A stream's first samples are read, and from its beginning each time."""
    loader = DataLoader(Stream(100), batch_size=7)
    assert numbers(read_samples(loader, 5)) == numbers(read_samples(loader, 5)) == [0, 1, 2, 3, 4]


class Several(Rows):
    """Fetched several at a time, as `datasets` does."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [torch.tensor([1000 + index]) for index in indices]


def test_getitems():
    """A dataset is asked the way a DataLoader asks it."""
    assert numbers(read_samples(DataLoader(Several(4)), 5)) == [1000, 1001, 1002, 1003]


class Once:
    """An iterable that is its own iterator, and can be copied."""

    def __init__(self) -> None:
        self.left = 5

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return torch.full((2,), float(self.left))


def test_read_once():
    """What can be read only once is copied first, and refused where it cannot be."""
    once = Once()
    assert numbers(read_batches(once, 2)) == [4, 3]
    assert once.left == 5
    generator = (torch.ones(2) for _ in range(3))
    with pytest.raises(UnreadableData) as caught:
        list(read_batches(generator, 1))
    assert str(caught.value) == (
        "generator can be read only once: a batch that BatchFinder took from it to probe with would be missing from the"
        " training."
    )
    assert len(list(generator)) == 3


class GoingOn(Stream):
    """A stream with one iterator, which each reader moves on."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        return self.iterator


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_stream_that_goes_on(batch_size):
    """Where a second reader of a stream would go on after the first, it is refused, and nothing is taken from it."""
    stream = GoingOn(5)
    loader = DataLoader(stream, batch_size=batch_size)
    with pytest.raises(UnreadableData, match=r"^GoingOn can be read only once: "):
        list((read_batches if batch_size is None else read_samples)(loader, 1))
    assert numbers(stream) == [0, 1, 2, 3, 4]


def test_made_batches():
    """Batches that a dataset or an iterable makes are read spread out where they can be indexed, else the first."""
    batches = [torch.full((2,), float(index)) for index in range(10)]
    assert numbers(read_batches(tuple(batches), 2)) == [0, 5]
    assert numbers(read_batches(DataLoader(batches, batch_size=None), 2)) == [0, 5]
    assert numbers(read_batches(DataLoader(Stream(9), batch_size=None), 2)) == [0, 1]
