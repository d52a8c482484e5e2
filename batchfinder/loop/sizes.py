"""What came of it: a size for each length, what makes up the target, and lowering a size that training proves wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from batchfinder.accumulation import AccumulationPlan
from batchfinder.errors import CacheFailed
from batchfinder.find import OutcomeSlot
from batchfinder.loop.micro_batches import MicroBatches, in_windows
from batchfinder.outcome import Outcome, Verdict
from batchfinder.probing.known import lower
from batchfinder.probing.signs import classify
from batchfinder.probing.summary import summary


@dataclass(frozen=True)
class TunedBatchSize:
    """What came of one length; as text, one line that says it all.

    Attributes:
        outcome: the largest size; its trials are those of this call, none when it came from the cache.
        plan: how the target is made up; None without one.
        limit_bytes: what training could take when the search began.
        reserve_bytes: what of it was kept free.
        seconds: what it took.
    """

    outcome: Outcome
    plan: AccumulationPlan | None
    limit_bytes: int
    reserve_bytes: int
    seconds: float
    _slot: OutcomeSlot | None = field(repr=False)
    _device: str = field(repr=False)
    _asked_by: str = field(default="tune_batch_size", repr=False)

    @property
    def batch_size(self) -> int:
        """The size to train with: the plan's micro-batch, or the largest."""
        return self.outcome.max_batch_size if self.plan is None else self.plan.micro_batch_size

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
        """A context for the training itself: when it runs out of memory, the record is lowered for the next start.

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
        return f"{summary(self.outcome, self.plan, self.limit_bytes, self.reserve_bytes, self.seconds)}."

    def _lower(self, message: str) -> str:
        """Lower the record; what to say of it."""
        ran_out = f"training ran out of memory at batch size {self.batch_size}, which ran when it was tried."
        if self._slot is None:
            return f"{ran_out} Leave more free with {self._asked_by}(headroom=0.05)."
        try:
            lowered = lower(self._slot, self.batch_size, message)
        except CacheFailed as error:
            return f"{ran_out} The record of it cannot be lowered: {error}"
        return f"{ran_out} The cache now says {lowered}, which the next start tries before it uses it."


class TunedBatchSizes(Mapping[int | None, TunedBatchSize]):
    """What came of each length; of data of one fixed shape, what came of None.

    Its own `batch_size`, `plan` and so on are those of the length with the smallest size, for a loop that trains all
    lengths with one.

    Args:
        sizes: by length.
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
        """What came of the length with the smallest size."""
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
