"""The micro-batches of one optimizer step, made or fetched one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from batchfinder.errors import InvalidValue


class MicroBatches:
    """What a `train_step` is given when it accumulates: an iterable of micro-batches that knows how many there are.

    A batch is made when the step asks for it, so that no more of them are in memory than in a plain loop.

    Args:
        batches: gives them, from the first.
        count: how many there are.

    Attributes:
        given: how many the step has asked for so far.
    """

    def __init__(self, batches: Callable[[], Iterator[Any]], count: int) -> None:
        self._batches = batches
        self._count = count
        self.given = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self._batches(), self._count):
            self.given += 1
            yield batch


def in_windows(batches: Iterable[Any], accumulation: int) -> Iterator[MicroBatches | list[Any]]:
    """Divide a loader's batches into those of one optimizer step each.

    Args:
        batches: a loader. If it has no length, the micro-batches of a step are fetched before the step begins.
        accumulation: micro-batches in a step; the last step of an epoch has fewer where they do not come out even.
    """
    iterator = iter(batches)
    left = _length(batches)
    if left is None:
        while window := list(islice(iterator, accumulation)):
            yield window
        return
    while left > 0:
        micro_batches = MicroBatches(_once(iterator), min(accumulation, left))
        yield micro_batches
        left -= len(micro_batches)
        for _ in islice(iterator, len(micro_batches) - micro_batches.given):
            pass  # what the step did not ask for


def _once(iterator: Iterator[Any]) -> Callable[[], Iterator[Any]]:
    """Gives an iterator the first time, and refuses to go on with what comes next in it the second."""
    waiting = [iterator]

    def take() -> Iterator[Any]:
        if not waiting:
            raise InvalidValue(
                "micro_batches", "a second pass", "one pass, or a list made of them where a step needs several"
            )
        return waiting.pop()

    return take


def _length(batches: Iterable[Any]) -> int | None:
    """How many batches there are; None when nobody knows."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset
        return None
