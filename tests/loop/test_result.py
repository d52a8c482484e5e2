"""Loaders divided into optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from batchfinder.accumulation import plan_accumulation
from batchfinder.errors import InvalidValue
from batchfinder.loop.result import TunedBatchSize
from batchfinder.measure.tuner import TuningResult
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Verdict


def in_windows(batches: Any, accumulation: int) -> Iterator[Any]:
    """The batches as a size of 1 divides them that makes up such a target."""
    found = SearchResult(Shape(), 1, StopReason.CAP, Measurement(Verdict.FITS), ())
    tuning = TuningResult(found, plan_accumulation(accumulation, 1), None, 0.0, 0, 0)
    return TunedBatchSize(tuning, "cpu").micro_batches(batches)


class Stream(IterableDataset[Any]):
    """Seven numbers, of which nobody knows how many there are."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


@pytest.mark.parametrize("loader", [range(7), DataLoader(range(7), batch_size=None)], ids=["range", "DataLoader"])
def test_each_step_has_its_micro_batches_and_their_number(loader: Any) -> None:
    """The last one of the epoch is shorter and says so."""
    windows = [(len(window), [int(batch) for batch in window]) for window in in_windows(loader, 3)]
    assert windows == [(3, [0, 1, 2]), (3, [3, 4, 5]), (1, [6])]


def test_a_loader_without_a_length() -> None:
    """The micro-batches of each step are fetched before it."""
    loader = DataLoader(Stream(), batch_size=None)
    assert [[int(batch) for batch in window] for window in in_windows(loader, 3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_batches_are_fetched_one_at_a_time() -> None:
    """No more are in memory than in a plain loop."""
    fetched: list[int] = []

    class Loader:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[torch.Tensor]:
            for index in range(4):
                fetched.append(index)
                yield torch.tensor(index)

    for number, window in enumerate(in_windows(Loader(), 2)):
        iterator = iter(window)
        next(iterator)
        assert fetched == list(range(2 * number + 1))
        next(iterator)


def test_what_a_step_leaves_is_not_the_next_ones() -> None:
    """A step that breaks off loses its own micro-batches only."""
    assert [next(iter(window)) for window in in_windows(range(6), 3)] == [0, 3]


def test_a_second_pass_is_refused() -> None:
    """The loader has gone on; the next step's batches are not to be taken for this one's."""
    window = next(in_windows(range(6), 3))
    assert list(window) == [0, 1, 2]
    with pytest.raises(InvalidValue) as caught:
        list(window)
    assert str(caught.value) == (
        "micro_batches: invalid value 'a second pass'; expected one pass, or a list made of them where a step needs "
        "several."
    )
