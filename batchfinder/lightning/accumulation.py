"""Setting Lightning's gradient accumulation by a plan, and saying where the plan's size is not what a step will see.

A callback that makes up a target by accumulation: sets it, weighs each window's micro-batches, and puts it back.

The right weight for each micro-batch of an optimizer step, where Lightning's is wrong.

Lightning divides every loss by k = `accumulate_grad_batches`. With micro-batches of n1 ... nr samples in a window (all
that is accumulated for one step) it steps with the gradient (g1 + ... + gr) / k, where gi is the gradient of the mean
over micro-batch i. That of the mean over all the window's samples is (n1 g1 + ... + nr gr) / (n1 + ... + nr). The two
agree in a full window of equal micro-batches, and differ in an epoch's last one, which may be shorter (r < k) and may
end in a smaller micro-batch.

So micro-batch i's loss is weighted by ni / n1 as it enters the backward, and the accumulated gradients by
k n1 / (n1 + ... + nr) before they are clipped. Both are exactly 1 wherever Lightning is right, and are then left
out, so that nothing changes by so much as a bit.
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

from batchfinder.accumulation import AccumulationPlan
from batchfinder.data.batch import tensors
from batchfinder.errors import InvalidValue
from batchfinder.lightning.batch_size import Applied
from batchfinder.lightning.compat import is_a
from batchfinder.lightning.dataloaders import samples_in_batch


def apply_accumulation(trainer: Trainer, plan: AccumulationPlan) -> Applied:
    """Make Lightning take an optimizer step every `plan.accumulation` micro-batches.

    Args:
        trainer: the trainer, with its module attached.
        plan: what makes up the target.

    Returns:
        What was set, one line each; `undo()` puts the old number back.

    Raises:
        InvalidValue: the plan is for another number of devices than the trainer uses.
        MisconfigurationException: something else decides about accumulation; the text says what to do.
    """
    if plan.num_devices != trainer.world_size:
        raise InvalidValue("plan.num_devices", plan.num_devices, f"the trainer's {trainer.world_size}")
    _check_nobody_else_accumulates(trainer, plan)
    warn_if_inexact_target(plan)
    if not trainer.lightning_module.automatic_optimization:
        return Applied()
    before = trainer.accumulate_grad_batches
    trainer.accumulate_grad_batches = plan.accumulation

    def undo() -> None:
        if trainer.accumulate_grad_batches == plan.accumulation:  # nobody has set another number since
            trainer.accumulate_grad_batches = before

    was = "" if before in (1, plan.accumulation) else f" (it was {before})"
    return Applied([f"accumulate_grad_batches = {plan.accumulation}{was}: {plan}"], [undo])


def warn_if_inexact_target(plan: AccumulationPlan) -> None:
    """Warn if the devices cannot make up the target.

    Args:
        plan: what makes it up.
    """
    if not plan.exact:
        rank_zero_warn(
            f"The target batch size of {plan.target_batch_size} is not a multiple of the {plan.num_devices} devices, so"
            f" that each optimizer step sees {plan}. Choose a multiple of {plan.num_devices} to have it exactly."
        )


def check_epoch_fills_a_step(trainer: Trainer, plan: AccumulationPlan) -> None:
    """Warn if an epoch has fewer micro-batches than the plan accumulates.

    Args:
        trainer: the trainer, once its loop knows how many batches an epoch has (`on_train_start`).
        plan: what makes up the target.
    """
    batches = trainer.num_training_batches
    if plan.accumulation <= batches or not trainer.lightning_module.automatic_optimization:
        return
    most = plan.micro_batch_size * int(batches) * plan.num_devices
    rank_zero_warn(
        f"An epoch has {batches} micro-batch{'es' if batches > 1 else ''} of {plan.micro_batch_size} samples on each"
        f" device, and {plan.accumulation} are needed for the target batch size of {plan.target_batch_size}. Lightning"
        f" steps at the end of each epoch, so that every optimizer step sees at most {most} samples. Their gradients"
        f" are averaged correctly, but for steps of one size choose a target_batch_size of at most {most}."
    )


def _check_nobody_else_accumulates(trainer: Trainer, plan: AccumulationPlan) -> None:
    made = f"a target batch size of {plan.target_batch_size}"
    if any(is_a(callback, "GradientAccumulationScheduler") for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"GradientAccumulationScheduler and BatchFinder with {made} both decide how many micro-batches are"
            " accumulated. Remove the scheduler, or leave out target_batch_size: BatchFinder then sets the batch size"
            " alone."
        )
    if plan.accumulation == 1:
        return
    if not trainer.lightning_module.automatic_optimization:
        raise MisconfigurationException(
            f"{made.capitalize()} takes {plan}, and {type(trainer.lightning_module).__name__} optimizes manually, where"
            " Lightning accumulates nothing. Leave out target_batch_size, and in training_step scale the loss by"
            f" 1/{plan.accumulation} and step the optimizer at every {plan.accumulation}th batch."
        )
    if trainer.strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"{made.capitalize()} takes {plan}, and {type(trainer.strategy).__name__} accumulates by its own"
            f" configuration, which is read before BatchFinder runs. Set its gradient_accumulation_steps to"
            f" {plan.accumulation}, and leave out target_batch_size."
        )


class Accumulating(Callback):  # type: ignore[misc, unused-ignore]
    """A callback that accumulates by its plan, and leaves micro-batches that anybody else accumulates alone.

    Attributes:
        plan: how a target is made up; None without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: AccumulationPlan | None = None
        self._accumulated = Applied()
        self._last_window = LastWindow()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn if an epoch is too short for the plan."""
        self._last_window.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count samples, for the weight of an epoch's last window."""
        if self.plan is not None:
            self._last_window.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Weigh a micro-batch that is smaller than its window's first."""
        if self.plan is not None:
            self._last_window.on_before_backward(trainer, pl_module, loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Weigh a window that is shorter than the plan's."""
        if self.plan is not None:
            self._last_window.on_before_optimizer_step(trainer, pl_module, optimizer)

    def _accumulate(self, trainer: Any, plan: AccumulationPlan | None) -> None:
        """Accumulate by a plan from now on; without one, as the trainer does."""
        self.plan, self._last_window = plan, LastWindow(plan)
        if plan is None:
            return
        replaced = trainer.accumulate_grad_batches != 1
        self._accumulated = apply_accumulation(trainer, plan)
        if replaced:  # else the summary has said all of it
            for line in self._accumulated:
                rank_zero_info(f"BatchFinder: {line}.")


class LastWindow:
    """Weighs each micro-batch by its share of the step's samples. The callback passes its own hooks on to these.

    How many samples a micro-batch has is known from the loader where it has a batch sampler of torch's kind and is the
    only one. Else it is the length that all tensors of the batch agree on; where they do not agree (a packed batch, a
    graph, several loaders) each micro-batch counts the same. A `training_step` that returned None counts like any
    other, as it does for Lightning. The mean is over samples: a loss that is a mean over tokens is
    weighed by samples as well.

    The hooks must run before a callback that looks at the gradients. GradScaler and DDP need nothing: a factor that is
    the same on every device, applied to the accumulated gradients, goes through both unchanged.

    Args:
        plan: what is accumulated, for a warning when an epoch is too short for it; None for no such warning.
    """

    def __init__(self, plan: AccumulationPlan | None = None) -> None:
        self.plan = plan
        self._sizes: list[int] = []  # of the window's micro-batches so far
        self._known = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if an epoch is too short for one step of the plan."""
        self._sizes = []
        if self.plan is not None:
            check_epoch_fills_a_step(trainer, self.plan)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note how many samples the micro-batch has."""
        samples = _samples(trainer, batch, batch_idx)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._sizes = []
        if not self._sizes:
            self._known = samples is not None
        self._sizes.append(samples if self._known and samples else (self._sizes or [1])[0])

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weigh the micro-batch against the first one of its window."""
        if self._applies(trainer, pl_module) and self._sizes[-1] != self._sizes[0] and loss.requires_grad:
            weight = self._sizes[-1] / self._sizes[0]
            loss.register_hook(lambda gradient: gradient * weight)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Weigh the window. This runs before the gradients are clipped."""
        if not self._applies(trainer, pl_module):
            return
        divided_by, samples = trainer.accumulate_grad_batches * self._sizes[0], sum(self._sizes)
        if divided_by == samples:
            return
        with torch.no_grad():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(divided_by / samples)

    def _applies(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        return pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1 and bool(self._sizes)


def _samples(trainer: Trainer, batch: Any, batch_idx: int) -> int | None:
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    if len(loaders) == 1 and (samples := samples_in_batch(loaders[0], batch_idx)) is not None:
        return samples
    lengths = {len(tensor) for _, tensor in tensors(batch) if tensor.ndim}
    return lengths.pop() if len(lengths) == 1 else None
