"""Where samples differ in length, the longest that a bounded look finds make up the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from batchfinder.data import longest_samples
from batchfinder.data.longest_samples import Extremes, MadeBatches, SampleBatches, UnreadableData
from tests.lightning.tiny import Rows


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
    assert int(made.batch(3)["ids"].sum()) == 3 * sum(range(90))
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


def test_made_batches():
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
    seen = Extremes(samples)
    assert seen.vary
    assert [id(sample) for sample in seen.longest()] == [id(samples[1]), id(samples[2])]
    assert seen.shortest is samples[0]
    assert not Extremes([torch.ones(2)] * 3).vary
    assert pad_sequence([samples[0][0][0], samples[1][0][0]]).shape == (9, 2)
