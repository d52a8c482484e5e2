"""Whatever the data come from: each loader has the size, and its samples come in the order they would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, WeightedRandomSampler

from batchfinder.lightning.callback import BatchFinder
from tests.lightning.identical_runs import Run, two_runs
from tests.lightning.tiny import Rows, Stream, Tiny, trainer

ProbeLoader = Callable[[int], dict[str, Any]]


class Noting(Tiny):
    """Notes its losses and every sample it sees, from one loader or several."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = (
            [batch] if isinstance(batch, torch.Tensor) else list(batch.values() if isinstance(batch, dict) else batch)
        )
        self.seen.append([part[:, 0].tolist() for part in parts if part is not None])
        loss = torch.stack([(self.layer(part) ** 2).mean() for part in parts if part is not None]).sum()
        self.losses.append(loss.item())
        return loss


class Data(pl.LightningDataModule):
    """Knows its batch size, and shuffles."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.rows = Rows(44, jitter=True)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, self.hparams.batch_size, shuffle=True)


class Fixed(Data):
    """Makes a loader whose size is written into the hook."""

    size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, self.size, shuffle=True)


def shuffled(size: int) -> DataLoader[Any]:
    """By torch's own random numbers."""
    return DataLoader(Rows(44), size, shuffle=True)


def seeded(size: int) -> DataLoader[Any]:
    """By a generator of its own."""
    return DataLoader(Rows(30, jitter=True), size, shuffle=True, generator=torch.Generator().manual_seed(4))


def drawn(size: int) -> DataLoader[Any]:
    """Some rows more often than others."""
    return DataLoader(Rows(40), size, sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(40)], 40))


def fixed(size: int) -> dict[str, Any]:
    """The datamodule whose hook knows nothing of a size that is found."""
    data = Fixed(0)
    data.size = size
    return {"datamodule": data}


FEEDS: dict[str, ProbeLoader] = {
    "datamodule": lambda size: {"datamodule": Data(size)},
    "datamodule with a fixed size": fixed,
    "loader": lambda size: {"train_dataloaders": shuffled(size)},
    "loader with a generator": lambda size: {"train_dataloaders": seeded(size)},
    "loader with a sampler": lambda size: {"train_dataloaders": drawn(size)},
    "list": lambda size: {"train_dataloaders": [shuffled(size), seeded(size)]},
    "dict": lambda size: {"train_dataloaders": {"a": shuffled(size), "b": drawn(size)}},
    "shortest ends": lambda size: {
        "train_dataloaders": CombinedLoader([shuffled(size), seeded(size)], mode="min_size")
    },
    "longest ends": lambda size: {"train_dataloaders": CombinedLoader([shuffled(size), seeded(size)], mode="max_size")},
    "stream": lambda size: {"train_dataloaders": DataLoader(Stream(44), size)},
    "stream and rows": lambda size: {"train_dataloaders": [DataLoader(Stream(44), size), shuffled(size)]},
}


def samples(run: Run) -> list[Any]:
    """What the run's module saw."""
    seen: list[Any] = run.module.seen
    return seen


@pytest.mark.parametrize("feed", FEEDS)
def test_the_same_samples_in_the_same_order(feed: str) -> None:
    """A search of the user's data leaves samplers, generators and random numbers where they were."""
    found, direct = two_runs(Noting, feed=FEEDS[feed])
    assert found.finder is not None
    assert found.finder.batch_size == 8
    assert samples(found) == samples(direct)
    assert {len(part) for batch in samples(found)[:3] for part in batch} == {8}
    assert found.module.losses == direct.module.losses


def test_a_stream_that_can_be_read_once_is_refused_in_full() -> None:
    """Before anything is taken from it."""

    def rows() -> Iterator[torch.Tensor]:
        yield from [torch.ones(2, 2, dtype=torch.float64)] * 4

    class Sized:
        """An iterator with a size."""

        batch_size = 2

        def __init__(self) -> None:
            self.rows = rows()

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> torch.Tensor:
            return next(self.rows)

    loader = Sized()
    with pytest.raises(Exception, match="can be read only once") as caught:
        trainer(callbacks=[BatchFinder(cache=False)]).fit(Noting(), loader)
    assert str(caught.value) == (
        "Sized can be read only once: a batch that BatchFinder took from it to probe with would be missing from the"
        " training. Pass BatchFinder make_batch=, a function that makes a batch of (batch_size, seq_len)."
    )
    assert len(list(loader.rows)) == 4


def test_a_loader_that_cannot_have_another_size_is_refused_before_anything_is_tried() -> None:
    """No step is taken, and what was set before stays."""
    module = Noting()
    loader = DataLoader([torch.ones(2, 2, dtype=torch.float64)] * 3, batch_size=None)
    with pytest.raises(Exception, match="cannot change the batch size") as caught:
        trainer(callbacks=[finder := BatchFinder(cache=False)]).fit(module, loader)
    assert str(caught.value) == (
        "batchfinder cannot change the batch size of the DataLoader passed to fit(): its batches are made by a list,"
        " which has no integer attribute `batch_size`. Give it one that it reads each time it is iterated, or make the"
        " loader in `train_dataloader()` with the size that the attribute `batch_size` of your module or datamodule"
        " holds."
    )
    assert finder.results == {}
    assert finder.results == {}


def test_a_loader_of_validation_is_refused_before_anything_is_tried() -> None:
    """Not after the size for training has been found."""

    class Evaluated(Noting):
        def val_dataloader(self) -> Any:
            return DataLoader([torch.ones(2, 2, dtype=torch.float64)] * 3, batch_size=None)

    module = Evaluated()
    finder = BatchFinder(cache=False, max_batch_size=4, also=["validate"])
    with pytest.raises(Exception, match=r"that Evaluated\.val_dataloader\(\) returned"):
        trainer(callbacks=[finder]).fit(module, shuffled(2))
    assert finder.results == {}
    assert module.seen == []


class TwoSizes(Noting):
    """Makes loaders of the batch size and of seven times that, as for labelled and unlabelled samples."""

    def __init__(self, batch_size: int = 2, constant: int | None = None) -> None:
        super().__init__()
        self.batch_size, self.constant = batch_size, constant

    made: list[int] = []

    def train_dataloader(self) -> Any:
        TwoSizes.made.append(self.batch_size)
        other = 7 * self.batch_size if self.constant is None else self.constant
        return {"labelled": DataLoader(Rows(400), self.batch_size), "unlabelled": DataLoader(Rows(400), other)}


@pytest.mark.parametrize(("constant", "expected"), [(None, (8, 56)), (5, (8, 5))])
def test_what_a_hook_computes_from_the_size_stays(
    constant: int | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tries and in training: each of several loaders has the size that the hook gives it, asked once for each."""
    tried: set[tuple[int, int]] = set()

    class Noted(TwoSizes):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tried.add((len(batch["labelled"]), len(batch["unlabelled"])))
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(TwoSizes, "made", [])
    finder, module = BatchFinder(max_batch_size=8, cache=False), Noted(constant=constant)
    trainer(callbacks=[finder], max_steps=2).fit(module)
    assert finder.batch_size == 8
    assert expected in tried
    assert all(other == (7 * size if constant is None else constant) for size, other in tried)
    assert [(len(one), len(other)) for one, other in module.seen] == [expected] * 2
    (found,) = finder.results["fit"].values()
    # Besides each size that was tried, for the data, for the cache's key of one sample, and by Lightning itself.
    assert len(TwoSizes.made) <= len({trial.batch_size for trial in found.trials}) + 4, TwoSizes.made


def test_loaders_in_turn_are_refused_before_a_search() -> None:
    """Lightning does not train with them, and says so only as the first epoch begins."""
    finder, loaders = BatchFinder(max_batch_size=4, cache=False), CombinedLoader([shuffled(2)] * 2, "sequential")
    with pytest.raises(MisconfigurationException) as caught:
        trainer(callbacks=[finder]).fit(Noting(), loaders)
    assert str(caught.value) == (
        'Lightning does not train with CombinedLoader(mode="sequential"), and BatchFinder has tried no size. Pass '
        'mode="max_size_cycle", "max_size" or "min_size".'
    )
    assert finder.results == {}
