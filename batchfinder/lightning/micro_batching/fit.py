"""A fit whose batches are split: the loader gives a whole optimizer step's samples, micro-batches are made of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from batchfinder.accumulation import plan_accumulation
from batchfinder.data.batch import Layout, samples_in, tensors
from batchfinder.data.padding import sample_lengths
from batchfinder.data.separability import SAMPLES, check_separable, not_separable
from batchfinder.distributed.agreement import Ranks
from batchfinder.errors import BatchFinderError
from batchfinder.lightning.accumulation import warn_if_inexact_target
from batchfinder.lightning.compat import training_step_arguments, transfer_batch
from batchfinder.lightning.dataloaders import ProbeBatches, batch_size_of, flattened
from batchfinder.lightning.ddp import gradient_sync, local_only
from batchfinder.lightning.dry_run import capture_data
from batchfinder.lightning.micro_batching.closure import MicroBatchClosure
from batchfinder.lightning.micro_batching.micro_batch import LengthTable, micro_batches
from batchfinder.lightning.micro_batching.recovery import BatchSnapshot, Recovery
from batchfinder.lightning.options import IN_ORDER, FinderOptions
from batchfinder.measure.tuner import TuningResult
from batchfinder.results import Shape

SHORTEST = 16
"""No size is found for shorter lengths: they gain little, and each costs a search."""

_NAMED_LAYERS = 3

log = logging.getLogger(__name__)


@dataclass(eq=False)
class DryRunMemory(Callback):  # type: ignore[misc, unused-ignore]
    """Takes part in the tries, each of which has two micro-batches of one size.

    In training the whole batch is on the device, and once more if it is sorted by length; and where a batch is to be
    run again after a failure, copies of buffers are there.

    Attributes:
        samples: of a whole batch on this device; None where the loaders do not say.
        recovers: whether batches are run again.
        in_order: whether samples keep their order.
    """

    samples: int | None
    recovers: bool
    in_order: bool

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Held until the try's own loop is dropped.
        held = vars(trainer.fit_loop).setdefault("_batchfinder_dry_run", [])
        if not held and self.recovers:
            held.append(BatchSnapshot(pl_module))
        if batch_idx == 0:
            here = samples_in(batch)
            whole = max(here, self.samples or 0)
            if whole > here and not self.in_order and sample_lengths(batch) is not None:
                whole += whole
            nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(batch))
            missing = (whole - here) * nbytes // here
            held.append(torch.ones(missing, dtype=torch.uint8, device=trainer.strategy.root_device))


class MicroBatchingFit:
    """Splits the batches of one fit.

    Attributes:
        recovers: whether a batch that runs out of memory is run again.
        table: the sizes by length; None before `begin`.
    """

    def __init__(self, options: FinderOptions, num_devices: int) -> None:
        self._options = options
        self._num_devices = num_devices
        self.recovers = num_devices == 1 if options.recover is None else options.recover
        self.table: LengthTable | None = None
        self._closure: MicroBatchClosure | None = None
        self._lengths: list[int | None] = []
        self._results: dict[int | None, TuningResult] = {}

    def samples(self, batches: ProbeBatches) -> int | None:
        """Samples of a batch on one device; None where the loaders do not say."""
        target = self._options.target_batch_size
        if target is None:
            sizes = {batch_size_of(loader) for loader in flattened(batches.loaders)} if batches.loaders else set()
            return sizes.pop() if len(sizes) == 1 else None
        plan = plan_accumulation(target, target, self._num_devices)
        warn_if_inexact_target(plan)
        return plan.micro_batch_size

    def lengths(self, longest: int | None) -> list[int | None]:
        """Which lengths to find sizes for, longest first: those asked for, or the data's longest, 3/4, 1/2 of it ..."""
        seq_lens = self._options.seq_lens
        self._lengths = [longest] if seq_lens is None else list(seq_lens)
        if seq_lens is None and longest is not None:
            while longest * 3 // 4 >= SHORTEST:
                self._lengths.append(longest * 3 // 4)
                longest //= 2
                if longest >= SHORTEST:
                    self._lengths.append(longest)
        return self._lengths

    def begin(
        self,
        trainer: Trainer,
        finder: Callback,
        batches: ProbeBatches,
        results: Sequence[TuningResult],
        ranks: Ranks,
    ) -> None:
        """Split from now on, by the results of each length, and warn once of all that this changes in what is trained.

        The trainer's loop has not started.
        """
        self._results = {found.result.shape.seq_len: found for found in results}
        sizes, size = {}, results[0].batch_size
        for length in self._lengths:  # a batch that fits whole at one length was not tried at shorter ones
            size = self._results[length].batch_size if length in self._results else size
            sizes[length] = size
        self.table = table = LengthTable(sizes)
        weight, in_order = self._options.weight, self._options.split_batches == IN_ORDER
        # What makes the split batch's gradient another one than the whole batch's. The loss is looked at with a few
        # samples, in eval mode and without gradients; all of that is put back.
        module = trainer.lightning_module
        reasons = []
        names = not_separable(module)
        if names:
            more = f" and {len(names) - _NAMED_LAYERS} more" if len(names) > _NAMED_LAYERS else ""
            reasons.append(
                f"{', '.join(names[:_NAMED_LAYERS])}{more} look at all samples of a micro-batch "
                "together, which are fewer than the batch's; a GroupNorm or LayerNorm would not"
            )

        def loss_of(batch: Any) -> Tensor:
            with trainer.precision_plugin.train_step_context():
                output = module.training_step(*training_step_arguments(trainer, batch))
            loss = output.get("loss") if isinstance(output, Mapping) else output
            return torch.tensor(float("nan")) if loss is None else loss

        samples = min(SAMPLES, *table.sizes.values())
        if samples > 1:
            untouched, start = capture_data(trainer, finder), BatchSnapshot(module)
            try:
                batch = transfer_batch(trainer, batches.mixed(samples))
                module.eval()
                vars(module)["log"] = vars(module)["log_dict"] = lambda *args, **kwargs: None
                with local_only(trainer):
                    differs = check_separable(loss_of, batch, weight)
                if differs is not None:
                    reasons.append(differs)
            except BatchFinderError:
                raise
            except Exception as error:  # of a step that cannot run in eval mode, say; training will show what it is
                log.info(
                    "BatchFinder: whether the loss may be split was not checked: %s: %s", type(error).__name__, error
                )
            finally:
                start.restore()
                untouched.restore()
        if reasons:
            rank_zero_warn(f"BatchFinder splits batches, which changes what is trained: {'. Also: '.join(reasons)}.")

        recovery = None
        if self.recovers:
            entries = {length: found.entry for length, found in self._results.items() if found.entry is not None}
            recovery = Recovery(table, entries, ranks)
        split_batch = partial(micro_batches, table=table, weight=weight, in_order=in_order, layout=Layout())
        sync = gradient_sync(trainer.strategy, self.recovers)
        self._closure = MicroBatchClosure(trainer, split_batch, sync, recovery)
        most = ", ".join(f"{size} samples up to {Shape(length)}" for length, size in reversed(table.sizes.items()))
        if None in table.sizes:
            most = f"{table.sizes[None]} samples"
        rank_zero_info(f"BatchFinder: batches are split into micro-batches of at most {most}.")

    def in_use(self) -> TuningResult | None:
        """What the micro-batch that was run last was made by; None before the first, and beyond the longest length."""
        if self._closure is None or self.table is None:
            return None
        return self._results.get(self.table.tabled(self._closure.seq_len))

    def end(self) -> None:
        """Leave the loop as it was. A second call does nothing."""
        if self._closure is not None:
            self._closure.undo()
        self._closure = None
