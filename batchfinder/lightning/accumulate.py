"""Setting Lightning's gradient accumulation by a plan, and saying where the plan's size is not what a step will see."""

from __future__ import annotations

from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning import Trainer

from batchfinder.accumulation import AccumulationPlan
from batchfinder.errors import InvalidValue
from batchfinder.lightning.feedback import Applied
from batchfinder.lightning.twins import is_a


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
