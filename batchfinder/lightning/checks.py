"""What of a trainer can be served, and what to do instead of what cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException

from batchfinder.errors import InvalidValue
from batchfinder.lightning.compat import is_a

_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
_OTHER_FINDERS = ("BatchSizeFinder",)
_FINDER = "batchfinder.lightning.callback.BatchFinder"
STAGES = ("validate", "test", "predict")


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
    if trainer.world_size > 1 and not is_a(strategy, "DDPStrategy"):
        raise MisconfigurationException(
            f"BatchFinder serves several devices under DDP alone, and this trainer has {trainer.world_size} under "
            f"{type(strategy).__name__}. Pass Trainer(strategy='ddp'), or run it once with Trainer(devices=1), then "
            "set the size that it reports by hand and remove the callback."
        )
    if trainer.strategy.root_device.type not in ("cpu", "cuda"):
        raise MisconfigurationException(
            f"BatchFinder can limit and measure the memory of CUDA devices and of the CPU, and this trainer's device "
            f"is {trainer.strategy.root_device}. Pass Trainer(accelerator='cpu') or 'gpu', or remove the callback."
        )
    if sum(_is_finder(callback) for callback in trainer.callbacks) > 1:
        raise MisconfigurationException(
            "This trainer has more than one BatchFinder, and each would set the batch size. Keep one of them."
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


def check_arguments(
    target: int | None,
    seq_lens: Sequence[int] | None,
    also: Iterable[str],
    headroom: float | int,
    cap: int | None,
    predict: Any,
) -> None:
    """Refuse arguments of the callback that cannot be meant.

    Args:
        target: samples per optimizer step.
        seq_lens: sequence lengths.
        also: stages besides training.
        headroom: a share, or bytes.
        cap: the largest size to try.
        predict: True, False or None.

    Raises:
        InvalidValue: names the argument and what it may be.
    """
    if target is not None and target < 1:
        raise InvalidValue("target_batch_size", target, "a size of at least 1")
    if cap is not None and cap < 1:
        raise InvalidValue("max_batch_size", cap, "a size of at least 1")
    if seq_lens is not None and (not seq_lens or min(seq_lens) < 1):
        raise InvalidValue("seq_lens", seq_lens, "lengths of at least 1, or None for the data's own")
    wrong = [stage for stage in also if stage not in STAGES]
    if wrong:
        raise InvalidValue("also", wrong[0], f"any of {', '.join(STAGES)}")
    if headroom < 0 or (isinstance(headroom, float) and headroom >= 1):
        raise InvalidValue("headroom", headroom, "a share from 0.0 to below 1.0, or a number of bytes")
    if not (predict is None or isinstance(predict, bool)):
        raise InvalidValue("predict", predict, "True, False, or None for on a GPU only")


def _is_finder(callback: Any) -> bool:
    return any(f"{base.__module__}.{base.__name__}" == _FINDER for base in type(callback).__mro__)
