"""What splitting takes besides micro-batches: there while sizes are tried, so that a size that was found trains.

Saying, before training, that splitting a batch changes what is trained: batch norms, and losses over pairs.

A fit whose batches are split: the loader gives a whole optimizer step's samples, micro-batches are made of them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from batchfinder.accumulation import plan_accumulation
from batchfinder.data.batch import Layout, samples_in, tensors
from batchfinder.data.loss_weights import WEIGHTS, Weight
from batchfinder.data.padding import sample_lengths
from batchfinder.data.separability import SAMPLES, check_separable, not_separable
from batchfinder.distributed.agreement import Ranks
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.lightning.accumulation import warn_if_inexact_target
from batchfinder.lightning.compat import is_a
from batchfinder.lightning.dataloaders import batch_size_of, flattened
from batchfinder.lightning.ddp import gradient_sync, local_only
from batchfinder.lightning.dry_run import Setting
from batchfinder.lightning.dry_run_scope import capture_data
from batchfinder.lightning.micro_batching.closure import MicroBatchClosure
from batchfinder.lightning.micro_batching.micro_batch import LengthTable, MicroBatch, micro_batches
from batchfinder.lightning.micro_batching.recovery import BatchSnapshot, Recovery
from batchfinder.lightning.probe_batches import ProbeBatches
from batchfinder.lightning.stage_tuner import Found
from batchfinder.measure.atomic_update import AtomicUpdate
from batchfinder.results import Shape


class DryRunMemory(Callback):  # type: ignore[misc, unused-ignore]
    """Takes part in the tries, each of which has two micro-batches of one size.

    In training the whole batch is on the device, and once more if it is sorted by length; and where a batch is to be
    run again after a failure, copies of buffers are there, and of the weights as they are updated.

    Args:
        samples: of a whole batch on this device; None where nobody can tell.
        recover: whether batches are run again.
        in_order: whether samples keep their order.
    """

    def __init__(self, samples: int | None, recover: bool, in_order: bool) -> None:
        self._samples = samples
        self._recover = recover
        self._in_order = in_order

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Take as much, until the try's own loop is dropped."""
        held = vars(trainer.fit_loop).setdefault("_split_rehearsal", [])
        if not held and self._recover:
            held.extend(AtomicUpdate(optimizer) for optimizer in trainer.optimizers)
            held.append(BatchSnapshot(pl_module))
        if batch_idx == 0:
            held.append(torch.ones(self._rest(batch), dtype=torch.uint8, device=trainer.strategy.root_device))

    def _rest(self, batch: Any) -> int:
        """Bytes of the whole batch that this part of it has not."""
        here = samples_in(batch)
        whole = max(here, self._samples or 0)
        if whole > here and not self._in_order and sample_lengths(batch) is not None:
            whole += whole
        nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(batch))
        return (whole - here) * nbytes // here


_NAMED = 3

log = logging.getLogger(__name__)


def warn_if_inexact(trainer: Any, finder: Any, batches: ProbeBatches, table: LengthTable, weight: Weight) -> None:
    """Warn once of all that makes the split batch's gradient another one than the whole batch's.

    The loss is looked at with a few samples, in eval mode and without gradients; all of that is put back.

    Args:
        trainer: set up, its loop not started.
        finder: the callback that asks.
        batches: where batches come from.
        table: the largest micro-batch of each length.
        weight: what the loss is said to be a mean over.

    Raises:
        NotSplittable: the batches cannot be taken apart, or the weight cannot be had from them.
        InvalidValue: the user's weight returned what cannot be meant.
    """
    found = []
    names = not_separable(trainer.lightning_module)
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        found.append(
            f"{', '.join(names[:_NAMED])}{more} look at all samples of a micro-batch together, which are fewer than "
            "the batch's; a GroupNorm or LayerNorm would not"
        )
    differs = _loss_differs(trainer, finder, batches, table, weight)
    if differs is not None:
        found.append(differs)
    if found:
        rank_zero_warn(f"BatchFinder splits batches, which changes what is trained: {'. Also: '.join(found)}.")


def _loss_differs(trainer: Any, finder: Any, batches: ProbeBatches, table: LengthTable, weight: Weight) -> str | None:
    """What is wrong with the weight or the loss, in words; None if nothing, or if nobody can tell."""
    module = trainer.lightning_module
    samples = min(SAMPLES, *table.sizes.values())
    if samples < 2:
        return None
    untouched, start = capture_data(trainer, finder), BatchSnapshot(module)
    try:
        batch = module._on_before_batch_transfer(batches.mixed(samples), dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch)
        module.eval()
        module.log = module.log_dict = lambda *args, **kwargs: None

        def loss_of(batch: Any) -> Tensor:
            kwargs = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
            with trainer.precision_plugin.train_step_context():
                seen = module.training_step(*kwargs.values())
            loss = seen.get("loss") if isinstance(seen, Mapping) else seen
            return torch.tensor(float("nan")) if loss is None else loss

        with local_only(trainer):
            return check_separable(loss_of, batch, weight)
    except BatchFinderError:
        raise
    except Exception as error:  # of a step that cannot run in eval mode, say; training will show what is wrong with it
        log.info("BatchFinder: whether the loss may be split was not checked: %s: %s", type(error).__name__, error)
        return None
    finally:
        start.restore()
        untouched.restore()


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


class MicroBatchingFit:
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
        self._step: MicroBatchClosure | None = None
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

    def rehearsal(self, samples: int | None) -> DryRunMemory:
        """What takes part in the tries.

        Args:
            samples: of a batch on one device; None where nobody can tell.
        """
        return DryRunMemory(samples, self._recover, self._in_order)

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
        self._step = MicroBatchClosure(trainer, take_apart, gradient_sync(trainer.strategy, self._recover), recovery)
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
