"""Reading samples without disturbing the loader, and the longest of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SubsetRandomSampler

from batchfinder.data import longest_samples
from batchfinder.data.longest_samples import (
    MadeBatches,
    SampleBatches,
    UnreadableData,
    find_extremes,
    read_batches,
    read_samples,
    spread,
)
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


class Sentences(Dataset[Any]):
    """Sentence i has `lengths[i]` tokens; reads are counted."""

    def __init__(self, lengths: list[int], target: list[int] | None = None) -> None:
        self.lengths, self.target, self.reads = lengths, target, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        sample: dict[str, Any] = {"ids": list(range(self.lengths[index])), "text": "x"}
        if self.target:
            sample["target"] = list(range(self.target[index]))
        return sample


def pad(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads, and changes what it is given while it does, as some collate functions do."""
    texts = [sample.pop("text") for sample in samples]
    batch: dict[str, Any] = {"text": texts}
    for name in samples[0]:
        widest = max(len(sample[name]) for sample in samples)
        for sample in samples:
            sample[name] += [0] * (widest - len(sample[name]))
        batch[name] = torch.tensor([sample[name] for sample in samples])
    return batch


def test_longest_of_all():
    """The one long sentence among 2000 is found, makes up the whole batch, and no more is read than said."""
    data = Sentences([5 + index % 3 for index in range(2000)])
    data.lengths[1377] = 90
    made = SampleBatches(DataLoader(data, batch_size=4, collate_fn=pad))
    assert made.batch(3)["ids"].shape == (3, 90)
    assert int(made.batch(3)["ids"].sum()) == 2 * sum(range(90)) + sum(range(5))  # one is padded
    assert data.reads == 2000 + longest_samples.DISTINCT
    long, short = made.extremes()
    assert (long["ids"].shape, short["ids"].shape) == ((2, 90), (2, 5))


def test_bounded():
    """Of a larger dataset 2048 samples spread over it are looked at, and none for a batch of a given length."""
    data = Sentences([5 + index % 3 for index in range(100_000)])
    made = SampleBatches(DataLoader(data, collate_fn=pad))
    made.batch(2, longest=False)
    assert data.reads == longest_samples.DISTINCT
    made.batch(2)
    assert data.reads == longest_samples.DISTINCT + longest_samples.SCANNED


def test_batches_of_other_lengths():
    """Each is as wide as a batch of the epoch and has a short one; one has none."""
    lengths = [5 + index % 20 for index in range(40)]
    made = SampleBatches(DataLoader(Sentences(lengths), shuffle=True, collate_fn=pad))
    assert made.others(1) == []
    *drawn, longest = (make()["ids"] for make in made.others(4))
    assert longest.shape == (4, 24)
    assert longest[:, 22].all()
    assert len({batch.shape[1] for batch in drawn}) > 2
    assert all([int(row.count_nonzero()) for row in batch] == [*[batch.shape[1] - 1] * 3, 4] for batch in drawn)
    in_order = SampleBatches(DataLoader(Sentences(sorted(lengths)), collate_fn=pad))
    assert min(make()["ids"].shape[1] for make in in_order.others(4)) < 15
    assert SampleBatches(DataLoader(Rows(100))).others(4) == []


def test_the_rare_batch_without_a_longest_sample_is_among_the_others():
    """Of 64 samples, one batch in 5000 has none of the eighth that is longest, and three in 200 none of a sixteenth."""
    rare = [10] * 7 + [11]
    made = SampleBatches(DataLoader(Sentences(rare * 50), shuffle=True, collate_fn=pad))
    assert {make()["ids"].shape[1] for make in made.others(64)} == {11}
    rarer = [10] * 15 + [11]
    made = SampleBatches(DataLoader(Sentences(rarer * 50), shuffle=True, collate_fn=pad))
    assert {make()["ids"].shape[1] for make in made.others(64)} == {10, 11}


def test_a_batch_of_the_longest_has_one_that_is_padded():
    """So that its mask is not full; one of a single sample has no room for it."""
    made = SampleBatches(DataLoader(Sentences([5 + index % 20 for index in range(40)]), collate_fn=pad))
    assert [int(row.count_nonzero()) for row in made.batch(4)["ids"]] == [23, 23, 23, 4]
    assert made.batch(1)["ids"].shape == (1, 24)


def test_source_and_target():
    """The longest source and the longest target both count, as a padded batch is as wide as either."""
    data = Sentences([5, 40, 6, 7], [4, 9, 30, 8])
    batch = SampleBatches(DataLoader(data, collate_fn=pad)).batch(2)
    assert (batch["ids"].shape, batch["target"].shape) == ((2, 40), (2, 30))


def test_all_alike():
    """Samples of one shape are repeated in turn, different ones first, after a look at no more than 32."""
    batch = SampleBatches(DataLoader(Rows(100))).batch(70)
    assert len({float(row[0]) for row in batch}) == 32
    assert torch.equal(batch[0], batch[32])


def test_time(monkeypatch):
    """A look that takes too long ends early, and says so."""
    monkeypatch.setattr(longest_samples, "SCAN_SECONDS", -1.0)
    made = SampleBatches(DataLoader(Sentences([5, 9, 7]), collate_fn=pad))
    with pytest.warns(UserWarning, match="The longest sample") as caught:
        made.batch(1)
    assert str(caught[0].message) == (
        "The longest sample was looked for among 1 only, as reading them took -1 seconds. If there are longer ones,"
        " pass make_batch=, or their length: seq_lens= of BatchFinder, seq_len= of tune_trainer."
    )


def test_empty():
    """No samples, and no batches, are refused."""
    with pytest.raises(UnreadableData) as caught:
        SampleBatches(DataLoader(Sentences([]), collate_fn=pad)).batch(1)
    assert str(caught.value) == "The dataset Sentences is empty: there is no sample to probe with."
    with pytest.raises(UnreadableData) as caught:
        MadeBatches(()).batch(1)
    assert str(caught.value) == "tuple is empty: there is no batch to probe with."


def test_the_largest_made_batch():
    """Of batches that are made elsewhere the one with the largest samples is stretched."""
    batches = tuple(torch.ones(2, length, dtype=torch.long) for length in (3, 8, 5))
    made = MadeBatches(batches)
    assert made.batch(7).shape == (7, 8)
    long, short = made.extremes()
    assert (long.shape, short.shape) == ((2, 8), (2, 3))


def test_extremes():
    """Lengths of tensors, lists and texts are all compared; what is the same everywhere is not."""
    samples = [
        (torch.ones(3, 5), [1, 2], "a"),
        (torch.ones(3, 9), [1], "abc"),
        (torch.ones(3, 2), [1, 2, 3, 4], "ab"),
    ]
    seen = find_extremes(samples)
    assert [id(sample) for sample in seen.longest] == [id(samples[1]), id(samples[2])]
    assert seen.shortest is samples[0]
    assert not find_extremes([torch.ones(2)] * 3).longest
    assert pad_sequence([samples[0][0][0], samples[1][0][0]]).shape == (9, 2)
