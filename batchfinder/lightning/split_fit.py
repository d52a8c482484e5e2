"""A fit whose batches are split: the loader gives a whole optimizer step's samples, micro-batches are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from batchfinder.accumulation import plan_accumulation
from batchfinder.errors import InvalidValue
from batchfinder.lightning.accumulate import warn_if_inexact_target
from batchfinder.lightning.batches import ProbeBatches
from batchfinder.lightning.finding import Found
from batchfinder.lightning.gradient_sync import gradient_sync
from batchfinder.lightning.length_table import LengthTable
from batchfinder.lightning.loaders import batch_size_of, flattened
from batchfinder.lightning.micro_batches import MicroBatch, micro_batches
from batchfinder.lightning.probe import Setting
from batchfinder.lightning.recovery import Recovery
from batchfinder.lightning.split_rehearsal import SplitRehearsal
from batchfinder.lightning.split_step import SplitStep
from batchfinder.lightning.split_warning import warn_if_inexact
from batchfinder.lightning.twins import is_a
from batchfinder.outcome import Shape
from batchfinder.probing.agreeing import Ranks
from batchfinder.probing.atomic_update import AtomicUpdate
from batchfinder.splitting.layout import Layout
from batchfinder.splitting.weights import WEIGHTS, Weight

SHORTEST = 16
"""No size is found for shorter ones: they gain little, and each costs a search."""

IN_ORDER = "in_order"


def check_split_arguments(split_batches: Any, weight: Any, recover: Any) -> None:
    """Refuse arguments that cannot be meant.

    Args:
        split_batches: True, False or `in_order`.
        weight: what the loss is a mean over.
        recover: True or False.

    Raises:
        InvalidValue: names the argument and what it may be.
    """
    if split_batches not in (True, False, IN_ORDER):
        raise InvalidValue("split_batches", split_batches, f"True, False or {IN_ORDER!r}")
    if not callable(weight) and weight not in WEIGHTS:
        raise InvalidValue("weight", weight, f"one of {', '.join(WEIGHTS)}, or a function of a micro-batch")
    if not isinstance(recover, bool):
        raise InvalidValue("recover", recover, "True or False")


def check_split(trainer: Any) -> None:
    """Refuse trainers whose batches cannot be split.

    Args:
        trainer: set up.

    Raises:
        MisconfigurationException: says what is in the way and what to do instead.
    """
    split, module = "BatchFinder(split_batches=True)", trainer.lightning_module
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{split} cannot split batches for {type(module).__name__}, which optimizes manually: its training_step "
            "decides what runs backward and when to step. Leave split_batches out, or call batchfinder.split_batch in "
            "training_step."
        )
    if any(is_a(callback, "GradientAccumulationScheduler") for callback in trainer.callbacks):
        raise MisconfigurationException(
            f"{split} takes one optimizer step for each batch, and GradientAccumulationScheduler one for several. "
            "Remove the scheduler, and pass target_batch_size=, the samples of an optimizer step."
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"{split} takes one optimizer step for each batch, and this trainer accumulates "
            f"{trainer.accumulate_grad_batches} batches. Leave Trainer(accumulate_grad_batches=) at 1, and pass "
            "BatchFinder target_batch_size=, the samples of an optimizer step."
        )


class SplitFit:
    """Splits the batches of one fit.

    Args:
        target: samples per optimizer step on all devices together; None for what the loaders give.
        seq_lens: lengths to find sizes for, longest first; None for the longest in the data, 3/4 of it, 1/2, 3/8 and
            so on.
        weight: what the loss is a mean over.
        recover: whether a batch that runs out of memory is run again.
        in_order: whether samples keep their order although their lengths are known.
    """

    def __init__(
        self, target: int | None, seq_lens: Sequence[int] | None, weight: Weight, recover: bool, in_order: bool
    ) -> None:
        self._target = target
        self._seq_lens = seq_lens
        self._weight = weight
        self._recover = recover
        self._in_order = in_order
        self._step: SplitStep | None = None
        self._updates: list[AtomicUpdate] = []
        self._lengths: list[int | None] = []
        self._founds: dict[int | None, Found] = {}
        self.table: LengthTable | None = None

    def samples(self, trainer: Any, batches: ProbeBatches) -> int | None:
        """Samples of a batch on one device; None where the loaders do not say.

        Args:
            trainer: set up.
            batches: where batches come from.
        """
        if self._target is None:
            sizes = {batch_size_of(loader) for loader in flattened(batches.loaders)} if batches.loaders else set()
            return sizes.pop() if len(sizes) == 1 else None
        plan = plan_accumulation(self._target, self._target, trainer.world_size)
        warn_if_inexact_target(plan)
        return plan.micro_batch_size

    def setting(self, samples: int | None) -> Setting:
        """What is tried: two micro-batches of a size, unless a batch fits whole.

        Args:
            samples: of a batch on one device; None where nobody can tell.
        """
        return Setting("fit", accumulation=2, split_batch_size=samples)

    def lengths(self, longest: int | None) -> list[int | None]:
        """Which lengths to find sizes for, longest first.

        Args:
            longest: the longest in the data; None for data without lengths.
        """
        self._lengths = [longest] if self._seq_lens is None else list(self._seq_lens)
        if self._seq_lens is None and longest is not None:
            while longest * 3 // 4 >= SHORTEST:
                self._lengths.append(longest * 3 // 4)
                longest //= 2
                if longest >= SHORTEST:
                    self._lengths.append(longest)
        return self._lengths

    def rehearsal(self, samples: int | None) -> SplitRehearsal:
        """What takes part in the tries.

        Args:
            samples: of a batch on one device; None where nobody can tell.
        """
        return SplitRehearsal(samples, self._recover, self._in_order)

    def begin(self, trainer: Any, finder: Any, batches: ProbeBatches, founds: Sequence[Found], ranks: Ranks) -> None:
        """Split from now on.

        Args:
            trainer: set up, its loop not started.
            finder: the callback that asks.
            batches: where batches come from.
            founds: the size of each length.
            ranks: the processes that train together.
        """
        self._founds = {found.outcome.shape.seq_len: found for found in founds}
        sizes, size = {}, founds[0].batch_size
        for length in self._lengths:  # a batch that fits whole at one length was not tried at shorter ones
            size = self._founds[length].batch_size if length in self._founds else size
            sizes[length] = size
        table = LengthTable(sizes)
        warn_if_inexact(trainer, finder, batches, table, self._weight)
        recovery = None
        if self._recover:
            slots = {length: found.slot for length, found in self._founds.items() if found.slot is not None}
            recovery = Recovery(table, slots, ranks)
            self._updates = [AtomicUpdate(optimizer, on_recovery=rank_zero_warn) for optimizer in trainer.optimizers]

        layout = Layout()

        def take_apart(batch: Any) -> list[MicroBatch]:
            return micro_batches(batch, table, self._weight, self._in_order, layout)

        self.table = table
        self._step = SplitStep(trainer, take_apart, gradient_sync(trainer.strategy, self._recover), recovery)
        rank_zero_info(f"BatchFinder: batches are split into micro-batches of at most {_text(table)}.")

    def in_use(self) -> Found | None:
        """What the micro-batch that was run last was made by; None before the first, and beyond the longest length."""
        if self._step is None or self.table is None:
            return None
        return self._founds.get(self.table.tabled(self._step.seq_len))

    def end(self) -> None:
        """Leave the loop and the optimizers as they were. A second call does nothing."""
        if self._step is not None:
            self._step.undo()
        for update in self._updates:
            update.undo()
        self._step, self._updates = None, []


def _text(table: LengthTable) -> str:
    sizes = table.sizes
    if None in sizes:
        return f"{sizes[None]} samples"
    return ", ".join(f"{size} samples up to {Shape(length)}" for length, size in reversed(sizes.items()))
