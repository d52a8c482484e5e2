"""Gradient accumulation by a plan: set in the trainer, weighed right in an epoch's last window, and put back.

Lightning divides every loss by k = `accumulate_grad_batches`. With micro-batches of n1 ... nr samples in a window (all
that is accumulated for one step) it steps with the gradient (g1 + ... + gr) / k, where gi is the gradient of the mean
over micro-batch i. That of the mean over all the window's samples is (n1 g1 + ... + nr gr) / (n1 + ... + nr). The two
agree in a full window of equal micro-batches, and differ in an epoch's last one, which may be shorter (r < k) and may
end in a smaller micro-batch.

So micro-batch i's loss is weighted by ni / n1 as it enters the backward, and the accumulated gradients by
k n1 / (n1 + ... + nr) before they are clipped. Both are exactly 1 wherever Lightning is right, and are then left
out, so that nothing changes by so much as a bit.

Under DDP the gradients are averaged over the ranks before that, and ranks whose streams differ in length end an epoch
with windows of other samples. So on all of d ranks n1 is the least of the first micro-batches of the run, and the
accumulated gradients are weighted by k n1 d / (the samples of all ranks' windows): the same factor on each.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from batchfinder.accumulation import AccumulationPlan
from batchfinder.data.batch import tensors
from batchfinder.distributed.agreement import Ranks
from batchfinder.lightning.batch_size import Applied
from batchfinder.lightning.compat import combined_loader
from batchfinder.lightning.dataloaders import samples_in_batch


def apply_accumulation(trainer: Trainer, plan: AccumulationPlan) -> Applied:
    """Make Lightning take an optimizer step every `plan.accumulation` micro-batches; `undo()` puts the old number back.

    Raises:
        MisconfigurationException: the strategy accumulates by itself; the text says what to do.
    """
    if plan.accumulation > 1 and trainer.strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"A target batch size of {plan.target_batch_size} takes {plan}, and {type(trainer.strategy).__name__}"
            " accumulates by its own configuration, which is read before BatchFinder runs. Set its"
            f" gradient_accumulation_steps to {plan.accumulation}, and leave out target_batch_size."
        )
    warn_if_inexact_target(plan)
    before = trainer.accumulate_grad_batches
    trainer.accumulate_grad_batches = plan.accumulation

    def undo() -> None:
        if trainer.accumulate_grad_batches == plan.accumulation:  # no other number has been set since
            trainer.accumulate_grad_batches = before

    was = "" if before in (1, plan.accumulation) else f" (it was {before})"
    return Applied([f"accumulate_grad_batches = {plan.accumulation}{was}: {plan}"], [undo])


def warn_if_inexact_target(plan: AccumulationPlan) -> None:
    """Warn if the target is no multiple of the devices. What else it is missed by, the summary says."""
    if plan.target_batch_size % plan.num_devices:
        rank_zero_warn(
            f"The target batch size of {plan.target_batch_size} is not a multiple of the {plan.num_devices} devices, so"
            f" that each optimizer step sees {plan}. Only a multiple of {plan.num_devices} can be met exactly."
        )


class Accumulating(Callback):  # type: ignore[misc, unused-ignore]
    """A callback that accumulates by its plan, and weighs each micro-batch by its share of the step's samples.

    How many samples a micro-batch has is known from the loader where it has a batch sampler of torch's kind and is the
    only one. Else it is the length that all tensors of the batch agree on; where they do not agree (a packed batch, a
    graph, several loaders) each micro-batch counts the same. A `training_step` that returned None counts like any
    other, as it does for Lightning. The mean is over samples: a loss that is a mean over tokens is weighed by samples
    as well.

    The hooks must run before a callback that looks at the gradients. GradScaler needs nothing: a factor applied to the
    accumulated gradients goes through it unchanged. Ranks count their samples together in each step, except where a
    DistributedSampler gives all of them as many. Without a plan nothing is weighed.

    Attributes:
        plan: how a target is made up; None without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: AccumulationPlan | None = None
        self._accumulated = Applied()
        self._ranks = Ranks()
        self._sizes: list[int] = []  # of the window's micro-batches so far
        self._unit: int | None = None  # what they are weighed against; 0 where samples cannot be counted
        self._alike = True  # whether all ranks have as many samples in each micro-batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sizes, self._unit = [], None
        plan, batches = self.plan, trainer.num_training_batches
        if plan is None or plan.accumulation <= batches:
            return
        size = plan.micro_batch_size
        last = min(size, samples_in_batch(_only_loader(trainer), int(batches) - 1) or size)
        samples = size * (int(batches) - 1) + last
        most = samples * plan.num_devices
        rank_zero_warn(
            f"{plan.in_short_epoch(samples)}. Lightning steps at the end of each epoch, so that every optimizer step "
            f"sees at most {most} samples. Their gradients are averaged correctly, but for steps of one size choose a "
            f"target_batch_size of at most {most}."
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.plan is None:
            return
        loader = _only_loader(trainer)
        samples = samples_in_batch(loader, batch_idx)
        counted = samples is not None
        if samples is None:
            lengths = {len(tensor) for _, tensor in tensors(batch) if tensor.ndim}
            samples = lengths.pop() if len(lengths) == 1 else None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._sizes = []
        if self._ranks.size == 1:
            self._unit = self._unit if self._sizes else samples or 0
        elif self._unit is None:
            sampler = getattr(loader.batch_sampler, "sampler", None) if counted else None
            self._unit, alike = self._ranks.all_reduce_min(samples or 0, isinstance(sampler, DistributedSampler))
            self._alike = bool(alike)
        self._sizes.append((samples or self._unit) if self._unit else 1)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weigh the micro-batch against the first one of its window."""
        if self.plan is None or trainer.accumulate_grad_batches == 1 or not self._sizes:
            return
        weight = self._sizes[-1] / (self._unit or 1)
        if weight != 1 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * weight)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Weigh the window. This runs before the gradients are clipped."""
        if self.plan is None or trainer.accumulate_grad_batches == 1 or not self._sizes:
            return
        divided_by, samples = trainer.accumulate_grad_batches * (self._unit or 1), sum(self._sizes)
        if not self._alike:
            divided_by *= self._ranks.size
            (samples,) = self._ranks.all_reduce_sum(samples)
        if divided_by == samples:
            return
        with torch.no_grad():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(divided_by / samples)

    def _accumulate(self, trainer: Trainer, plan: AccumulationPlan | None) -> None:
        """Accumulate by a plan from now on; without one, as the trainer does."""
        self.plan, self._sizes = plan, []
        if plan is None:
            return
        replaced = trainer.accumulate_grad_batches != 1
        self._accumulated = apply_accumulation(trainer, plan)
        if replaced:  # else the summary has said all of it
            for line in self._accumulated:
                rank_zero_info(f"BatchFinder: {line}.")


def _only_loader(trainer: Trainer) -> Any:
    """The loader that training reads; None where it reads several, and before it has one."""
    combined = combined_loader(trainer.fit_loop)
    return combined.flattened[0] if combined is not None and len(combined.flattened) == 1 else None
