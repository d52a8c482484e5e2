"""What is tried, the size aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from batchfinder.search import Bounds

MICRO_BATCHES = 2
"""The second micro-batch of a step runs with the gradients of the first alive; a third adds nothing."""


@dataclass(frozen=True)
class Setting:
    """A loop as the user has it.

    Attributes:
        train_step: takes a batch, or with a target the micro-batches of one optimizer step.
        make_batch: `make_batch(batch_size, seq_len)` returns a batch as a loader would.
        state: what the user has named of all that `train_step` changes.
        device: where the model is.
        target_batch_size: samples per optimizer step; None without a target.
        min_batch_size: the smallest size of use.
        multiple_of: the granularity of sizes.
        asked_by: the function that the user called, for messages.
        left_alone: what can be reached and is not to be put back: bulk data.
        made_before: says whether a model or an optimizer was there before the tries; None for any that is used.
    """

    train_step: Callable[[Any], object]
    make_batch: Callable[[int, int | None], Any]
    state: tuple[Any, ...]
    device: torch.device
    target_batch_size: int | None
    min_batch_size: int
    multiple_of: int
    asked_by: str = "tune_batch_size"
    left_alone: tuple[Any, ...] = ()
    made_before: Callable[[object], bool] | None = None

    @property
    def smallest(self) -> int:
        """The smallest size that may be tried."""
        return Bounds(min_batch_size=self.min_batch_size, multiple_of=self.multiple_of).first

    @property
    def name(self) -> str:
        """What people call it: the classes of its modules, or else the function."""
        modules = ", ".join(type(each).__name__ for each in self.state if isinstance(each, torch.nn.Module))
        return modules or str(getattr(self.train_step, "__name__", ""))

    def micro_batches(self, batch_size: int) -> int:
        """How many micro-batches of this size to try in one optimizer step.

        Args:
            batch_size: samples in a micro-batch.
        """
        return MICRO_BATCHES if self.target_batch_size is not None and batch_size < self.target_batch_size else 1
