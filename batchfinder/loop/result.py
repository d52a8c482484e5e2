"""The sizes that a loop trains with: one for each length, its micro-batches, and a watch for out-of-memory errors."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from batchfinder.cache.validity import lower
from batchfinder.errors import CacheFailed, InvalidValue
from batchfinder.measure.oom import classify
from batchfinder.measure.tuner import TuningResult
from batchfinder.results import Verdict


class MicroBatches:
    """What a `train_step` is given when it accumulates: an iterable of micro-batches that knows how many there are.

    A batch is made when the step asks for it, so that no more of them are in memory than in a plain loop.

    Args:
        batches: gives them, from the first.
        count: how many there are.
        ended: called where a step that has made all of them first goes on to the next one.
        of: how many a step of training has, where these stand for it; None for as many.

    Attributes:
        given: how many the step has asked for so far.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Any]],
        count: int,
        ended: Callable[[], object] = lambda: None,
        of: int | None = None,
    ) -> None:
        self._batches = batches
        self._count = count
        self.ended = ended
        self.of = count if of is None else of
        self.given = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self._batches(), self._count):
            self.given += 1
            yield batch


class TunedBatchSize:
    """The batch size for one length; as text, a line with all there is to say of it.

    Attributes:
        tuning: how it was found: the largest size with its trials, the plan, the limits, the cache entry.
        result: the largest size that runs; its trials are those of this call.
        plan: how the target is made up; None without one.
        batch_size: the size to train with: the plan's micro-batch, or the largest.
        accumulation: micro-batches per optimizer step; 1 without a target.
    """

    def __init__(self, tuning: TuningResult, device: str, caller: str = "tune_batch_size") -> None:
        self.tuning = tuning
        self.result = tuning.result
        self.plan = tuning.plan
        self.batch_size = tuning.batch_size
        self.accumulation = 1 if tuning.plan is None else tuning.plan.accumulation
        self._device = device
        self._caller = caller

    def micro_batches(self, batches: Iterable[Any]) -> Iterator[MicroBatches | list[Any]]:
        """Divide the batches of a loader, of `batch_size` each, into what `train_step` takes.

        Args:
            batches: one epoch's loader. Where its last batch is smaller, it weighs as much as the others: give it
                `drop_last=True`, or let `train_step` weigh by samples. If it has no length, the micro-batches of a step
                are fetched before the step begins.

        Yields:
            The micro-batches of one optimizer step, an iterable with a length; fewer at the end of an epoch where they
            do not come out even.
        """
        iterator, left = iter(batches), None
        with suppress(TypeError):  # a DataLoader over an IterableDataset has no length
            left = len(batches) if isinstance(batches, Sized) else None
        if left is None:
            while window := list(islice(iterator, self.accumulation)):
                yield window
            return
        while left > 0:
            waiting = [iterator]

            def once(waiting: list[Iterator[Any]] = waiting) -> Iterator[Any]:
                if not waiting:  # the iterator would go on with the next step's batches
                    raise InvalidValue(
                        "micro_batches", "a second pass", "one pass, or a list made of them where a step needs several"
                    )
                return waiting.pop()

            micro_batches = MicroBatches(once, min(self.accumulation, left))
            yield micro_batches
            left -= len(micro_batches)
            for _ in islice(iterator, len(micro_batches) - micro_batches.given):
                pass  # what the step did not ask for

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context for the training itself: when it runs out of memory, the cached result is lowered.

        Not where a Trainer's evaluation does, which has a size of its own.

        Raises:
            Exception: whatever training raises, unchanged.
        """
        try:
            yield
        except Exception as error:
            if classify(error, device=self._device) not in (Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY):
                raise
            ran = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
            if self._caller == "tune_trainer" and "evaluation_loop" in ran:
                warnings.warn(
                    "an evaluation ran out of memory, so the size of training stays as it is. The Trainer keeps its "
                    "outputs on the GPU until it ends: pass TrainingArguments(eval_accumulation_steps=) to move them "
                    "to the host, or a smaller per_device_eval_batch_size.",
                    stacklevel=3,
                )
                raise
            said = f"training ran out of memory at batch size {self.batch_size}, which ran when it was tried."
            if self.tuning.entry is None:
                said += f" Leave more memory free with {self._caller}(headroom=0.05)."
            else:
                try:
                    lowered = lower(self.tuning.entry, self.batch_size, str(error))
                except CacheFailed as failed:
                    said += f" The cached result cannot be lowered: {failed}"
                else:
                    after = f"The cache now says {lowered}, which the next start tries before it uses it."
                    said += f" {after if lowered else 'The next start searches again.'}"
            warnings.warn(said, stacklevel=3)
            raise

    def __str__(self) -> str:
        return f"{self.tuning}."


class TunedBatchSizes(TunedBatchSize, Mapping[int | None, TunedBatchSize]):
    """The batch size for each length; for data of one fixed shape the length is None.

    Its own `batch_size`, `plan` and so on are those of the length with the smallest size, for a loop that trains all
    lengths with one.

    Attributes:
        smallest: that of the length with the smallest size.
    """

    def __init__(self, sizes: Mapping[int | None, TunedBatchSize]) -> None:
        self._sizes = dict(sizes)
        self.smallest = smallest = min(sizes.values(), key=lambda size: size.batch_size)
        super().__init__(smallest.tuning, smallest._device, smallest._caller)

    def __getitem__(self, seq_len: int | None) -> TunedBatchSize:
        return self._sizes[seq_len]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __str__(self) -> str:
        return "\n".join(map(str, self._sizes.values()))
