"""What hands the batches out in practice: DataLoaders with workers, resumable ones, trainers, several processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from batchfinder import BatchFinder, FunctionProbe, LengthBucketBatchSampler, Shape, find_max_batch_size
from batchfinder.errors import InvalidValue

LENGTHS = [1 + 37 * i % 64 for i in range(64)]
TABLE = {32: 8, 64: 4}
STEPS = 12


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> float:
        return float(index)


class Seen(pl.LightningModule):
    """Notes which samples it was trained with, by epoch."""

    def __init__(self, loader: type[DataLoader[Any]] = DataLoader, num_workers: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self._loader = loader
        self._num_workers = num_workers

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(batch.long().tolist())
        return self.layer(batch.float()[:, None]).mean()

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = _sampler()
        # Workers ask for batches before the trainer says which epoch it resumes with; docs/sampler.md has this line.
        sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return self._loader(Numbers(), batch_sampler=sampler, num_workers=self._num_workers)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def _sampler() -> LengthBucketBatchSampler:
    return LengthBucketBatchSampler(LENGTHS, TABLE)


def _fit(model: Seen, folder: Path, resume: Path | None = None, **arguments: Any) -> Seen:
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )
    trainer.fit(model, ckpt_path=resume, weights_only=False)
    return model


@pytest.fixture(scope="module")
def epochs() -> list[list[list[int]]]:
    """The batches of the first three."""
    sampler = _sampler()
    found = [list(sampler) for _ in range(3)]
    assert [len(epoch) for epoch in found] == [STEPS] * 3
    return found


def test_workers(epochs: list[list[list[int]]]) -> None:
    """Processes that fetch ahead get the same batches in the same order, and the loader knows how many there are. The
    batches trained, not those asked for, are where another goes on."""
    sampler = _sampler()
    loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=2)
    assert len(loader) == STEPS
    for number, batch in enumerate(loader):
        assert batch.tolist() == epochs[0][number]
        if number == 2:
            state = sampler.state_dict(batches=3)
            assert sampler.state_dict()["batches"] > 3
    assert [batch.tolist() for batch in loader] == epochs[1]
    resumed = _sampler()
    resumed.load_state_dict(state)
    assert list(resumed) == epochs[0][3:]


@pytest.fixture(autouse=True)
def no_workers_left() -> Iterator[None]:
    """A loader left in a cycle is collected now: in a later test, ending its workers was seen to take 40 s."""
    yield
    gc.collect()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_keeps_its_place(num_workers: int, epochs: list[list[list[int]]]) -> None:
    """torchdata's StatefulDataLoader saves and finds the sampler's place, of those trained."""

    def loader() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(Numbers(), batch_sampler=_sampler(), num_workers=num_workers)

    first = loader()
    list(first)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in resumed] == epochs[1][5:]
    assert [batch.tolist() for batch in resumed] == epochs[2]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_trainer(num_workers: int, epochs: list[list[list[int]]], tmp_path: Path) -> None:
    """A trainer goes through the epochs, each in its order; it goes on from the middle of one with torchdata's loader,
    and from the end of one with any."""
    whole = [batch for epoch in epochs for batch in epoch]
    end = ModelCheckpoint(tmp_path, filename="end")
    first = _fit(Seen(DataLoader, num_workers), tmp_path, max_epochs=1, callbacks=[end])
    rest = _fit(Seen(DataLoader, num_workers), tmp_path, Path(end.best_model_path), max_epochs=3)
    assert first.seen + rest.seen == whole

    middle = ModelCheckpoint(tmp_path, filename="middle", every_n_train_steps=15)
    first = _fit(Seen(StatefulDataLoader, num_workers), tmp_path, max_steps=15, callbacks=[middle])
    rest = _fit(Seen(StatefulDataLoader, num_workers), tmp_path, Path(middle.best_model_path), max_epochs=3)
    assert first.seen + rest.seen == whole


def test_sizes_of_the_callback() -> None:
    """A `BatchFinder` that has found sizes for several lengths is a table."""
    finder = BatchFinder(seq_lens=[32, 64])
    with pytest.raises(InvalidValue, match="it finds sizes when training begins"):
        LengthBucketBatchSampler(LENGTHS, finder)
    probe = FunctionProbe(lambda batch_size, shape: batch_size * (shape.seq_len or 1), capacity_bytes=256)
    found = {seq_len: find_max_batch_size(probe, Shape(seq_len)) for seq_len in (64, 32)}
    finder.results = {"fit": dict(found)}
    assert LengthBucketBatchSampler(LENGTHS, finder).batch_sizes == TABLE


def _rank(rank: int, folder: str) -> None:
    """One of two processes that train together: writes its batches."""
    sampler = _sampler()
    alone = len(sampler)
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.save((alone, len(sampler), list(sampler)), f"{folder}/{rank}")
    distributed.barrier()  # the other one may be connecting still
    distributed.destroy_process_group()


def test_several_processes(tmp_path: Path) -> None:
    """A sampler made before torch.distributed is set up sees the ranks when it is iterated."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    found = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    batches = [LengthBucketBatchSampler(LENGTHS, TABLE, num_replicas=2, rank=rank) for rank in range(2)]
    assert found == [(STEPS, STEPS // 2, list(sampler)) for sampler in batches]
    assert sorted(i for _, _, mine in found for batch in mine for i in batch) == list(range(64))
