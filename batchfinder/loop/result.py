"""The sizes that a loop trains with: one for each length, its micro-batches, and a watch for out-of-memory errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from batchfinder.accumulation import AccumulationPlan
from batchfinder.cache.validity import lower
from batchfinder.errors import CacheFailed, InvalidValue
from batchfinder.measure.oom import classify
from batchfinder.measure.tuner import TuningResult
from batchfinder.results import SearchResult, Verdict


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
    """Return the iterator the first time; the second time it would go on with the next step's batches."""
    waiting = [iterator]

    def take() -> Iterator[Any]:
        if not waiting:
            raise InvalidValue(
                "micro_batches", "a second pass", "one pass, or a list made of them where a step needs several"
            )
        return waiting.pop()

    return take


def _length(batches: Iterable[Any]) -> int | None:
    """How many batches there are; None when it cannot be known."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset
        return None


@dataclass(frozen=True)
class TunedBatchSize:
    """The batch size for one length; as text, a line with all there is to say of it.

    Attributes:
        tuning: how it was found: the largest size with its trials, the plan, the limits, the cache entry.
    """

    tuning: TuningResult
    _device: str = field(repr=False)
    _caller: str = field(default="tune_batch_size", repr=False)

    @property
    def result(self) -> SearchResult:
        """The largest size that runs; its trials are those of this call."""
        return self.tuning.result

    @property
    def plan(self) -> AccumulationPlan | None:
        """How the target is made up; None without one."""
        return self.tuning.plan

    @property
    def batch_size(self) -> int:
        """The size to train with: the plan's micro-batch, or the largest."""
        return self.tuning.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step; 1 without a target."""
        return 1 if self.plan is None else self.plan.accumulation

    def micro_batches(self, batches: Iterable[Any]) -> Iterator[MicroBatches | list[Any]]:
        """Divide the batches of a loader, of `batch_size` each, into what `train_step` takes.

        Args:
            batches: one epoch's loader. Where its last batch is smaller, it weighs as much as the others: give it
                `drop_last=True`, or let `train_step` weigh by samples.

        Yields:
            The micro-batches of one optimizer step, an iterable with a length; fewer at the end of an epoch where they
            do not come out even.
        """
        return in_windows(batches, self.accumulation)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context for the training itself: when it runs out of memory, the cached result is lowered.

        Raises:
            Exception: whatever training raises, unchanged.
        """
        try:
            yield
        except Exception as error:
            if classify(error, device=self._device) in (Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY):
                warnings.warn(self._lower(str(error)), stacklevel=3)
            raise

    def __str__(self) -> str:
        return f"{self.tuning}."

    def _lower(self, message: str) -> str:
        """Lower the cached result; what to say of it."""
        ran_out = f"training ran out of memory at batch size {self.batch_size}, which ran when it was tried."
        if self.tuning.entry is None:
            return f"{ran_out} Leave more memory free with {self._caller}(headroom=0.05)."
        try:
            lowered = lower(self.tuning.entry, self.batch_size, message)
        except CacheFailed as error:
            return f"{ran_out} The cached result cannot be lowered: {error}"
        if lowered == 0:
            return f"{ran_out} The next start searches again."
        return f"{ran_out} The cache now says {lowered}, which the next start tries before it uses it."


class TunedBatchSizes(Mapping[int | None, TunedBatchSize]):
    """The batch size for each length; for data of one fixed shape the length is None.

    Its own `batch_size`, `plan` and so on are those of the length with the smallest size, for a loop that trains all
    lengths with one.
    """

    def __init__(self, sizes: Mapping[int | None, TunedBatchSize]) -> None:
        self._sizes = dict(sizes)

    def __getitem__(self, seq_len: int | None) -> TunedBatchSize:
        return self._sizes[seq_len]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def smallest(self) -> TunedBatchSize:
        """That of the length with the smallest size."""
        return min(self._sizes.values(), key=lambda size: size.batch_size)

    @property
    def batch_size(self) -> int:
        """The size to train with; see `TunedBatchSize.batch_size`."""
        return self.smallest.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step; 1 without a target."""
        return self.smallest.accumulation

    @property
    def plan(self) -> AccumulationPlan | None:
        """How the target is made up; None without one."""
        return self.smallest.plan

    def micro_batches(self, batches: Iterable[Any]) -> Iterator[MicroBatches | list[Any]]:
        """Divide the batches of a loader into what `train_step` takes; see `TunedBatchSize.micro_batches`."""
        return self.smallest.micro_batches(batches)

    def watch(self) -> AbstractContextManager[None]:
        """A context for the training itself; see `TunedBatchSize.watch`."""
        return self.smallest.watch()

    def __str__(self) -> str:
        return "\n".join(map(str, self._sizes.values()))
