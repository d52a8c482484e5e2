"""Batches for probes come from the user's own data and collate_fn, at any size, and leave the data as they were."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset
from transformers import BatchEncoding

from batchfinder.data.batch import tensors
from batchfinder.lightning.dataloaders import ProbeBatches
from tests.lightning.tiny import Hooked, Rows, Stream, Tiny, trainer

MAKE_BATCH = "Pass BatchFinder make_batch=, a function that makes a batch of (batch_size, seq_len)."


class Texts(Dataset[Any]):
    """Sentences of 4 to 12 tokens."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(4 + index % 9), "label": index % 2}


def pad(samples: list[dict[str, Any]]) -> BatchEncoding:
    """Pads to the longest."""
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    mask = (ids > 0)[:, None] & (ids > 0)[:, :, None]
    return BatchEncoding(
        {"input_ids": ids, "mask": mask, "label": torch.tensor([sample["label"] for sample in samples])}
    )


def probing(loaders: Any, make_batch: Any = None, stage: str = "fit", module: Any = None) -> ProbeBatches:
    """The batches of loaders, or of a module's hook, before Lightning has asked for any."""
    runner = trainer()
    module = module or Tiny()
    runner.strategy.connect(module)
    runner._data_connector.attach_data(
        module, **{"train_dataloaders" if stage == "fit" else "val_dataloaders": loaders}
    )
    loop = runner.fit_loop if stage == "fit" else runner.validate_loop
    return ProbeBatches(runner, module, loop._data_source, make_batch)


class Named(NamedTuple):
    """A sample by name."""

    x: torch.Tensor
    y: int


@dataclasses.dataclass
class Record:
    """A sample by field."""

    x: torch.Tensor


def record(samples: list[Record]) -> Record:
    """Stacks the field."""
    return Record(torch.stack([sample.x for sample in samples]))


X = torch.ones(2)
SAMPLES = [X, (X, 1), {"x": X, "n": {"y": 1.0}}, Named(X, 1), Record(X), BatchEncoding({"x": X}), ("text", 2), [X, [X]]]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
@pytest.mark.parametrize("batch_size", [1, 3, 40])
def test_any_sample(sample, batch_size):
    """Samples of every make are collated as the loader collates them, to any size."""
    data: Any = [sample] * 5
    loader = DataLoader(data, batch_size=2, collate_fn=record if isinstance(sample, Record) else None)
    batch = probing(loader).batch(batch_size)
    assert type(batch) is type(next(iter(loader))) or isinstance(sample, BatchEncoding)
    assert {len(tensor) for _, tensor in tensors(batch)} == {batch_size}
    assert isinstance(batch, Record) == isinstance(sample, Record)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Rows(22), batch_size=4),
        DataLoader(Rows(22), batch_size=4, num_workers=2, shuffle=True),
        DataLoader(Rows(22), batch_sampler=[[0, 1], [2]]),
        DataLoader(Stream(22), batch_size=4),
        DataLoader([torch.ones(3, 2)] * 4, batch_size=None),
        DataLoader(Stream(22), batch_size=None, collate_fn=lambda row: row[None]),
        CombinedLoader([DataLoader(Rows(22))], "sequential"),
    ],
    ids=range(7),
)
def test_any_loader(loader):
    """Loaders of every kind give batches of the size asked for, without being iterated."""
    batches = probing(loader)
    before = torch.get_rng_state()
    assert [batches.batch(size).shape for size in (1, 5, 64)] == [(1, 2), (5, 2), (64, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(getattr(each, "_iterator", None) is None for each in batches._combined.flattened)


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_several_loaders(mode):
    """With several loaders a batch is what training gets: the dict of their batches, or the list."""
    loaders = {"a": DataLoader(Rows(22)), "b": [DataLoader(Stream(9)), DataLoader(Texts(), collate_fn=pad)]}
    batch = probing(CombinedLoader(loaders, mode)).batch(6, None)
    assert list(batch) == ["a", "b"]
    assert (batch["a"].shape, batch["b"][0].shape, batch["b"][1]["input_ids"].shape) == ((6, 2), (6, 2), (6, 12))
    assert [len(each) for each in probing([DataLoader(Rows(2)), DataLoader(Rows(3))]).batch(4)] == [4, 4]


def test_loaders_in_turn():
    """Where loaders take turns, as in validation, the batch is that of the one with the largest samples."""
    loaders = [DataLoader(Rows(22)), DataLoader([torch.ones(50)] * 3), DataLoader(Rows(22))]
    assert probing(loaders, stage="validate").batch(4).shape == (4, 50)
    assert probing(CombinedLoader(loaders, "sequential")).batch(4).shape == (4, 50)


def test_lengths():
    """Without a length the longest sentences make up the batch; with one, all that follows it is stretched."""
    batches = probing(DataLoader(Texts(), batch_size=4, collate_fn=pad))
    assert batches.longest_seq_len == 12
    for seq_len in (None, 5, 12, 30):
        batch = batches.batch(7, seq_len)
        assert isinstance(batch, BatchEncoding)
        length = seq_len or 12
        assert batch["input_ids"].shape == (7, length)
        assert batch["mask"].shape == (7, length, length)
        assert batch["label"].shape == (7,)


def test_no_length():
    """Data of one shape without tokens has no length, and asking for one says what to do."""
    batches = probing(DataLoader(Rows(22)))
    assert batches.longest_seq_len is None
    with pytest.raises(MisconfigurationException) as caught:
        batches.batch(2, 128)
    assert str(caught.value) == (
        "BatchFinder cannot tell which dimension of the batches is the sequence, to make it 128 long: no length varies"
        f" between samples, and no two-dimensional integer tensor could hold tokens. {MAKE_BATCH}"
    )


def test_no_samples_in_a_batch():
    """A batch that does not tell how many samples it has is refused."""
    with pytest.raises(MisconfigurationException) as caught:
        probing(DataLoader(["text"], batch_size=None)).batch(2)
    assert (
        str(caught.value)
        == f"The batches of DataLoader hold no tensor that tells how many samples there are. {MAKE_BATCH}"
    )


class Asked(Hooked):
    """Counts how often it is asked for loaders."""

    asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return super().train_dataloader()


def test_hook_is_asked_once():
    """The hook is called once, when the first batch is needed."""
    module = Asked()
    batches = probing(None, module=module)
    assert module.asked == 0
    batches.batch(3)
    batches.batch(30)
    assert (batches.dataset_size(), batches.longest_seq_len, module.asked) == (22, None, 1)


def test_make_batch():
    """A function of the user's is given size and length; data are read for nothing but their number."""
    asked = []
    batches = probing(DataLoader(Rows(22)), lambda batch_size, seq_len: asked.append((batch_size, seq_len)))
    batches.batch(3, 7)
    batches.batch(4)
    assert asked == [(3, 7), (4, None)]
    assert batches.longest_seq_len is None
    assert batches.dataset_size() == 22
    assert probing(None, lambda batch_size, seq_len: batch_size).dataset_size() is None


def test_no_loaders():
    """Without loaders and without make_batch the message names both ways."""
    with pytest.raises(MisconfigurationException) as caught:
        probing(None).batch(1)
    assert str(caught.value) == (
        "There are no loaders to take batches from: define train_dataloader() in the module or a datamodule, or pass"
        f" loaders to the trainer. {MAKE_BATCH}"
    )


@pytest.mark.parametrize(
    ("loaders", "size"),
    [
        (DataLoader(Rows(22)), 22),
        (DataLoader(Rows(22), drop_last=True), 22),
        ([DataLoader(Rows(22)), DataLoader(Rows(30))], 30),
        ([DataLoader(Rows(22), drop_last=True), DataLoader(Rows(30))], 22),
        ([DataLoader(Rows(22), drop_last=True), DataLoader(Stream(30))], 22),
        ([DataLoader(Rows(22)), DataLoader(Stream(30))], None),
        (DataLoader(Stream(22)), None),
    ],
)
def test_dataset_size(loaders, size):
    """The largest batch that makes sense: all samples of the largest loader, unless another would drop all it has."""
    assert probing(loaders).dataset_size() == size


def test_datamodule():
    """A datamodule's loaders are used as well."""
    runner, module = trainer(), Tiny()
    runner.strategy.connect(module)
    data = pl.LightningDataModule.from_datasets(Rows(22), batch_size=3)
    runner._data_connector.attach_data(module, datamodule=data)
    assert ProbeBatches(runner, module, runner.fit_loop._data_source).batch(9).shape == (9, 2)


def test_errors_of_the_users_own():
    """What the user's dataset or collate_fn raises comes through as it is."""

    def broken(samples: Any) -> Any:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        probing(DataLoader(Rows(22), collate_fn=broken)).batch(2)


def test_the_smaller_last_batch_is_tried_where_training_gets_to_it() -> None:
    """An epoch of 50 in batches of 16 ends with 2, in batches of 7 with one, which is left out; 10 leave none."""

    def last(size: int, drop_last: bool = False, **settings: Any) -> list[int]:
        batches = probing(DataLoader(Rows(50), batch_size=4, drop_last=drop_last))
        for name, value in settings.items():
            setattr(batches.trainer, name, value)
        batches.trainer.fit_loop.epoch_loop.max_steps = settings.get("steps", -1)
        return [len(make()) for make in batches.last(size)]

    assert (last(16), last(7), last(10), last(60)) == ([2], [], [], [50])
    assert last(16, drop_last=True) == []
    assert last(16, limit_train_batches=3) == last(16, limit_train_batches=0.9) == last(16, overfit_batches=2) == []
    assert last(16, limit_train_batches=4) == [2]
    assert (last(16, steps=4), last(16, steps=5)) == ([], [2])
    several = probing([DataLoader(Rows(50), batch_size=4), DataLoader(Rows(50), batch_size=4)])
    assert several.last(16) == []
    assert probing(None, lambda size, length: torch.zeros(size, 3)).last(16) == []


def test_a_made_batch_of_other_lengths_has_both_loaders_parts() -> None:
    """Sentences vary and rows do not: each of the batches has a part of each."""
    both = probing([DataLoader(Texts(), batch_size=4, collate_fn=pad), DataLoader(Rows(50), batch_size=4)])
    made = [make() for make in both.others(6)]
    assert {len(rows) for _, rows in made} == {6}
    assert {len(texts["input_ids"]) for texts, _ in made} == {6}
    assert made[-1][0]["input_ids"].shape == (6, 12)


def test_batches_of_the_length_that_was_found_are_as_those_without_one() -> None:
    """The longest in the data is what the callback asks for: its batches are padded, an epoch has others besides."""
    texts = probing(DataLoader(Texts(), batch_size=4, collate_fn=pad))
    assert texts.longest_seq_len == 12
    for length in (None, 12):
        batch = texts.batch(6, length)
        assert (batch["input_ids"].shape, batch["mask"].all()) == ((6, 12), False)
        assert len(texts.others(6, length)) > 2
    assert texts.others(6, 8) == []


@pytest.mark.parametrize(("samples", "drop_last", "batches"), [(50, False, 13), (50, True, 12), (3, True, 1)])
def test_batches_of_an_epoch(samples: int, drop_last: bool, batches: int) -> None:
    """With and without the smaller last one; where all samples are fewer than a batch, one of these."""
    assert probing(DataLoader(Rows(samples), batch_size=2, drop_last=drop_last)).batches_per_epoch(4) == batches


@pytest.mark.parametrize(("limit", "batches"), [(1.0, 13 + 3), (0.5, 6 + 1), (5, 5 + 3), (1, 1 + 1)])
def test_batches_of_a_validation(limit: float, batches: int) -> None:
    """Its loaders take turns, and the Trainer's limit is for each."""
    validating = probing([DataLoader(Rows(50)), DataLoader(Rows(12))], stage="validate")
    validating.trainer.limit_val_batches = limit
    assert validating.batches_per_epoch(4) == batches


@pytest.mark.parametrize(("drop_last", "batch_size", "left_out"), [(True, 30, 20), (True, 25, 0), (False, 30, 0)])
def test_samples_that_drop_last_leaves_out(drop_last: bool, batch_size: int, left_out: int) -> None:
    """The rest of the division, where the loader drops it; nothing where the data are fewer than a batch."""
    batches = probing(DataLoader(Rows(50), batch_size=2, drop_last=drop_last))
    assert batches.left_out(batch_size) == left_out
    assert batches.left_out(60) == 0
    batches.trainer.limit_train_batches = 1  # a batch, not all of them
    assert batches.left_out(batch_size) == 0
