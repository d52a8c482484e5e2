"""A loader whose size was changed is, batch for batch, one that was made with that size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

from batchfinder.data.bucket_sampler import LengthBucketBatchSampler
from batchfinder.lightning.dataloaders import (
    batch_size_of,
    check_resizable,
    flattened,
    resize,
    samples_in_batch,
    samples_per_epoch,
)
from tests.lightning.tiny import Rows, Stream, Tiny, same, trainer


class Buckets:
    """A batch sampler of the user's own, not one of torch's."""

    def __init__(self, rows: int, batch_size: int) -> None:
        self.rows, self.batch_size = rows, batch_size

    def __iter__(self) -> Any:
        return iter(
            [list(range(at, min(at + self.batch_size, self.rows))) for at in range(0, self.rows, self.batch_size)]
        )

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)


class Fixed:
    """A batch sampler without a size."""

    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        return 2


class Grouped(RandomSampler):
    """A sampler that groups by the loader's batch size, as transformers' LengthGroupedSampler does."""

    def __init__(self, rows: Any, batch_size: int) -> None:
        super().__init__(rows)
        self.batch_size = batch_size

    def __iter__(self) -> Any:
        order = list(super().__iter__())
        groups = [sorted(order[at : at + 2 * self.batch_size]) for at in range(0, len(order), 2 * self.batch_size)]
        return iter([index for group in groups for index in group])


class Stuck(Fixed):
    """A batch sampler whose size nobody can set."""

    @property
    def batch_size(self) -> int:
        return 2


class Keyed(Rows):
    """Rows that can be asked for several at a time."""

    def __getitem__(self, index: Any) -> Any:
        return index if isinstance(index, list) else super().__getitem__(index)


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


KINDS = {
    "plain": lambda size: DataLoader(Rows(22), batch_size=size),
    "shuffled": lambda size: DataLoader(Rows(22), batch_size=size, shuffle=True),
    "positional": lambda size: DataLoader(Rows(22), size, True),
    "generator": lambda size: DataLoader(Rows(22), batch_size=size, shuffle=True, generator=seeded(5)),
    "drop_last": lambda size: DataLoader(Rows(22), batch_size=size, shuffle=True, drop_last=True),
    "subset": lambda size: DataLoader(Rows(22), batch_size=size, sampler=SubsetRandomSampler(range(3, 20))),
    "batch_sampler": lambda size: DataLoader(
        Rows(22), batch_sampler=BatchSampler(RandomSampler(Rows(22), generator=seeded(6)), size, True)
    ),
    "buckets": lambda size: DataLoader(Rows(22), batch_sampler=Buckets(22, size)),
    "grouped": lambda size: DataLoader(Rows(22), batch_size=size, sampler=Grouped(Rows(22), size)),
    "stream": lambda size: DataLoader(Stream(22), batch_size=size),
    "stream_drop_last": lambda size: DataLoader(Stream(22), batch_size=size, drop_last=True),
    "jitter": lambda size: DataLoader(Rows(22, jitter=True), batch_size=size, shuffle=True),
    "collate": lambda size: DataLoader(Rows(22), batch_size=size, collate_fn=lambda rows: torch.stack(rows[::-1])),
    "batch_size_none": lambda size: DataLoader(
        Keyed(22),
        batch_size=None,
        sampler=BatchSampler(SequentialSampler(range(22)), size, False),
        collate_fn=torch.tensor,
    ),
}


def epochs(loader: Any, times: int = 2) -> list[Any]:
    """Some epochs' batches, from one seed."""
    torch.manual_seed(3)
    return [batch for _ in range(times) for batch in loader]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 22, 64])
def test_as_if_made_so(kind, size):
    """For each kind of loader, two epochs at a changed size are bit for bit those of a loader made with the size."""
    made, changed = KINDS[kind](size), KINDS[kind](3)
    assert batch_size_of(changed) == 3
    undo = resize(changed, size, "fit")
    assert batch_size_of(changed) == size
    assert changed.batch_size == made.batch_size
    if kind != "stream" and kind != "stream_drop_last":
        assert len(changed) == len(made)
    assert same(epochs(changed), epochs(made))
    undo()
    assert same(epochs(changed, 1), epochs(KINDS[kind](3), 1)) or kind in (
        "generator",
        "batch_sampler",
        "batch_size_none",
    )
    assert batch_size_of(changed) == 3


@pytest.mark.parametrize("kind", ["generator", "jitter", "stream"])
def test_with_workers(kind):
    """With worker processes, whose seeds come from the loader's generator, it is the same."""
    runs = []
    for size, changed in ((5, False), (3, True)):
        loader = KINDS[kind](size)
        loader.num_workers, loader.prefetch_factor = 2, 2
        if changed:
            resize(loader, 5, "fit")
        runs.append(epochs(loader, 1))
    assert same(*runs)


def test_all_else_is_the_same_object():
    """Dataset, sampler, batch sampler, generator and collate_fn stay the very objects they were."""
    loader = DataLoader(Rows(9), batch_size=2, shuffle=True, generator=seeded(1), collate_fn=torch.stack)
    before = {name: id(value) for name, value in vars(loader).items() if name != "batch_size"}
    undo = resize(loader, 4, "fit")
    after = {name: id(value) for name, value in vars(loader).items() if name not in ("batch_size", "__pl_attrs_record")}
    assert after == before
    undo()
    assert {name: id(value) for name, value in vars(loader).items() if name != "batch_size"} == before
    assert "__pl_attrs_record" not in vars(loader)


class HookMade(Tiny):
    """Makes its loader in a hook, where Lightning notes the arguments."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make()

    predict_dataloader = train_dataloader


@pytest.mark.parametrize(
    ("kind", "hook", "way"),
    [
        case
        for case in itertools.product(
            ["plain", "shuffled", "generator", "drop_last", "batch_sampler", "collate"],
            [False, True],
            ["overfit", "predict", "distributed"],
        )
        if case != ("batch_sampler", False, "distributed")  # Lightning 2.6.6 cannot: it leaves batch_size=None
    ],
)
def test_after_lightning_made_it_anew(kind, hook, way, monkeypatch):
    """A loader that Lightning builds anew, for overfit_batches, predict or a distributed sampler, keeps the size."""
    runs = []
    for size, changed in ((5, False), (3, True)):

        def make(size=size, changed=changed):
            loader = KINDS[kind](size)
            if changed:
                resize(loader, 5, "fit")
            return loader

        settings = {"overfit_batches": 3} if way == "overfit" else {}
        runner = trainer(**settings)
        if way == "distributed":
            monkeypatch.setattr(type(runner._accelerator_connector), "is_distributed", True)
            monkeypatch.setattr(
                type(runner), "distributed_sampler_kwargs", {"num_replicas": 2, "rank": 1}, raising=False
            )
        module = HookMade(make) if hook else Tiny()
        pl.seed_everything(1, verbose=False)
        run = runner.predict if way == "predict" else runner.fit
        run(module, *([] if hook else [make()]))
        runs.append(module.seen)
    assert len(runs[0]) > 1
    if (kind, way) == ("batch_sampler", "distributed"):  # Lightning drops a BatchSampler passed in, and its size
        assert {len(batch) for batch in runs[0]} == {1}
        assert [len(batch) for batch in runs[1]] == [5, 5, 1]
        return
    assert same(*runs)


class Counted(BatchSampler):
    """A batch sampler of the user's own, whose arguments Lightning notes."""


def test_custom_batch_sampler_made_anew():
    """A subclass of torch's batch sampler made in a hook keeps the size when predict builds it anew."""

    def make(size: int) -> Any:
        loader = DataLoader(Rows(22), batch_sampler=Counted(SequentialSampler(Rows(22)), size, False))
        resize(loader, 5, "predict")
        return loader

    module = HookMade(lambda: make(3))
    trainer().predict(module)
    assert [len(batch) for batch in module.seen] == [5, 5, 5, 5, 2]


@pytest.mark.parametrize(
    ("loader", "maker"),
    [
        (DataLoader(Rows(9), batch_sampler=Fixed()), "Fixed"),
        (DataLoader(Stream(9), batch_size=None), "Stream"),
        ([torch.ones(2)], "list"),
    ],
)
def test_no_size_to_change(loader, maker):
    """A loader whose batches are made by something without a size is refused, and the message says by what."""
    assert batch_size_of(loader) is None
    with pytest.raises(MisconfigurationException) as caught:
        check_resizable(loader, "the loader passed to fit()", "train_dataloader")
    assert str(caught.value) == (
        f"batchfinder cannot change the batch size of the loader passed to fit(): its batches are made by a {maker},"
        " which has no integer attribute `batch_size`. Give it one that it reads each time it is iterated, or make the"
        " loader in `train_dataloader()` with the size that the attribute `batch_size` of your module or datamodule"
        " holds."
    )


def test_sizes_by_length():
    """A sampler that has a size for each length is refused, and the message says how these are found."""
    sampler = LengthBucketBatchSampler([3, 5, 5], {4: 2, 8: 1})
    with pytest.raises(MisconfigurationException) as caught:
        check_resizable(DataLoader(Rows(3), batch_sampler=sampler), "the loader passed to fit()", "train_dataloader")
    assert str(caught.value) == (
        "batchfinder cannot change the batch size of the loader passed to fit(): its LengthBucketBatchSampler has one"
        " for each length. Find these first, with BatchFinder(seq_lens=...) on a loader that has a batch_size, and give"
        " the finder to the sampler; then train without BatchFinder."
    )


def test_size_that_does_not_stick():
    """A batch sampler whose size is fixed is refused with its name and the numbers."""
    with pytest.raises(MisconfigurationException) as caught:
        resize(DataLoader(Rows(9), batch_sampler=Stuck()), 4, "fit")
    assert str(caught.value) == (
        "The batch_size of Stuck was set to 4 and is still 2. Let it be set, and read it each time a batch is made."
    )


def test_one_loader_for_two_stages():
    """A loader that two stages share cannot have two sizes; the same size twice is fine."""
    loader = DataLoader(Rows(9), batch_size=2)
    resize(loader, 4, "fit")
    resize(loader, 4, "validate")
    resize(loader, 4, "fit")
    with pytest.raises(MisconfigurationException) as caught:
        resize(loader, 8, "validate")
    assert str(caught.value) == (
        "The same loader is used to fit, at batch size 4, and to validate, at batch size 8, and cannot have both. Give"
        " each stage a loader of its own, or leave one of the two out of BatchFinder's `also`."
    )


def test_flattened():
    """One loader, lists, dicts and CombinedLoaders all come apart without being iterated."""
    one, two = DataLoader(Rows(3)), DataLoader(Rows(4))
    assert flattened(one) == [one]
    assert flattened([one, two]) == flattened({"a": one, "b": [two]}) == [one, two]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 4, 11, 22, 30])
def test_samples_in_batch(size, drop_last):
    """The sizes foretold for an epoch's batches are those they have."""
    loader = DataLoader(Rows(22), batch_size=size, drop_last=drop_last)
    seen = [len(batch) for batch in loader]
    assert [samples_in_batch(loader, index) for index in range(len(seen))] == seen
    assert samples_in_batch(DataLoader(Stream(22), batch_size=size), 0) is None
    assert samples_in_batch(DataLoader(Rows(22), batch_sampler=Fixed()), 0) is None
    assert samples_in_batch([1], 0) is None


def test_samples_per_epoch(monkeypatch):
    """An epoch's samples on one device: by the sampler, shared between devices where Lightning will share them."""
    runner = trainer()
    assert samples_per_epoch(runner, DataLoader(Rows(22))) == 22
    assert samples_per_epoch(runner, DataLoader(Rows(22), sampler=SubsetRandomSampler(range(7)))) == 7
    assert samples_per_epoch(runner, DataLoader(Rows(22), batch_sampler=Fixed())) == 22
    assert samples_per_epoch(runner, DataLoader(Stream(22))) is None
    assert samples_per_epoch(runner, DataLoader(Rows(22), batch_size=None)) is None
    assert samples_per_epoch(runner, [1, 2]) is None
    monkeypatch.setattr(type(runner._accelerator_connector), "is_distributed", True)
    monkeypatch.setattr(type(runner), "distributed_sampler_kwargs", {"num_replicas": 4}, raising=False)
    assert samples_per_epoch(runner, DataLoader(Rows(22))) == 6
    assert samples_per_epoch(runner, DataLoader(Rows(22), sampler=SubsetRandomSampler(range(7)))) == 2
    own = DistributedSampler(Rows(22), num_replicas=2, rank=0, drop_last=True)
    assert samples_per_epoch(runner, DataLoader(Rows(22), sampler=own)) == 11
