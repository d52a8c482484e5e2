"""What of a trainer can be served, and what to do instead of what cannot."""

from __future__ import annotations

from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException

_PACKAGES = ("pytorch_lightning.", "lightning.pytorch.", "lightning_fabric.", "lightning.fabric.")
_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
_OTHER_FINDERS = ("BatchSizeFinder",)
STAGES = ("validate", "test", "predict")


def is_a(thing: Any, *names: str) -> bool:
    """Whether an object's class is, or is derived from, one of Lightning's by that name.

    By name, since `pytorch_lightning` and `lightning.pytorch` hold the same classes twice.

    Args:
        thing: a callback, a strategy, ...
        names: names of classes.
    """
    return any(base.__name__ in names and base.__module__.startswith(_PACKAGES) for base in type(thing).__mro__)


def is_lightnings_own(thing: Any) -> bool:
    """Whether an object's class is defined in Lightning."""
    return type(thing).__module__.startswith(_PACKAGES)


def check(trainer: Any, target_batch_size: int | None) -> None:
    """Refuse what cannot be served yet.

    Args:
        trainer: set up.
        target_batch_size: samples per optimizer step; None for no target.

    Raises:
        MisconfigurationException: says what is in the way and what to do instead.
    """
    strategy = trainer.strategy
    if is_a(strategy, *_SHARDING):
        raise MisconfigurationException(
            f"BatchFinder cannot try sizes under {type(strategy).__name__}: it shards the model's state over "
            "processes, which could not be put back after a try. Find the size on one device of the same kind with "
            "Trainer(devices=1), then set it by hand and remove the callback."
        )
    if trainer.world_size > 1:
        raise MisconfigurationException(
            f"BatchFinder serves one device for now, and this trainer has {trainer.world_size}: when one process runs "
            "out of memory, the others wait for it for ever. Run it once with Trainer(devices=1), then set the size "
            "that it reports by hand and remove the callback."
        )
    if trainer.strategy.root_device.type not in ("cpu", "cuda"):
        raise MisconfigurationException(
            f"BatchFinder can limit and measure the memory of CUDA devices and of the CPU, and this trainer's device "
            f"is {trainer.strategy.root_device}. Pass Trainer(accelerator='cpu') or 'gpu', or remove the callback."
        )
    others = [type(callback).__name__ for callback in trainer.callbacks if is_a(callback, *_OTHER_FINDERS)]
    if others:
        raise MisconfigurationException(
            f"BatchFinder and {others[0]} would both set the batch size. Remove {others[0]} from "
            "Trainer(callbacks=...)."
        )
    if target_batch_size is None:
        return
    if any(is_a(callback, "GradientAccumulationScheduler") for callback in trainer.callbacks):
        raise MisconfigurationException(
            f"BatchFinder(target_batch_size={target_batch_size}) and GradientAccumulationScheduler would both set how "
            "many batches are accumulated. Remove the scheduler, or the target."
        )
    if trainer.state.fn == "fit" and not trainer.lightning_module.automatic_optimization:
        raise MisconfigurationException(
            f"BatchFinder(target_batch_size={target_batch_size}) cannot accumulate for a model with manual "
            "optimization: its training_step decides when to step. Leave out target_batch_size; "
            f"batchfinder.plan_accumulation({target_batch_size}, finder.batch_size) says what to accumulate."
        )
