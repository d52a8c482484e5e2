"""The callback's options, their checks, and the trainers it refuses, each with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback

from batchfinder.data.split import WEIGHTS, Weight
from batchfinder.errors import InvalidValue
from batchfinder.lightning.compat import callbacks_of, is_a
from batchfinder.measure.options import SearchOptions
from batchfinder.measure.tuner import SearchLimits

IN_ORDER = "in_order"
EVALUATION_STAGES = ("validate", "test", "predict")


@dataclass(frozen=True, kw_only=True)
class FinderOptions(SearchOptions):
    """The arguments of a BatchFinder; see there for what they mean.

    Attributes:
        seq_lens: the longest first.

    Raises:
        InvalidValue: names the argument and what it may be.
    """

    seq_lens: tuple[int, ...] | None
    make_batch: Callable[[int, int | None], Any] | None
    also: tuple[str, ...]
    batch_size_attribute: str
    probe_callbacks: tuple[Callback | type[Callback], ...]
    predict: bool
    split_batches: bool | str
    weight: Weight
    recover: bool | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split_batches and (self.min_batch_size > 1 or self.multiple_of > 1):
            name = "min_batch_size" if self.min_batch_size > 1 else "multiple_of"
            raise InvalidValue(
                name,
                getattr(self, name),
                "1 with split_batches=, where a batch's last micro-batch is what is left of it",
            )
        if self.split_batches and self.goal != "memory":
            expected = "memory with split_batches=, where lengths and not sizes differ from one micro-batch to the next"
            raise InvalidValue("goal", self.goal, expected)
        if self.seq_lens is not None and (not self.seq_lens or min(self.seq_lens) < 1):
            raise InvalidValue("seq_lens", self.seq_lens, "lengths of at least 1, or None for the data's own")
        for stage in self.also:
            if stage not in EVALUATION_STAGES:
                raise InvalidValue("also", stage, f"any of {', '.join(EVALUATION_STAGES)}")
        if not isinstance(self.predict, bool):
            raise InvalidValue("predict", self.predict, "True or False")
        if self.split_batches not in (True, False, IN_ORDER):
            raise InvalidValue("split_batches", self.split_batches, f"True, False or {IN_ORDER!r}")
        if not callable(self.weight) and self.weight not in WEIGHTS:
            raise InvalidValue("weight", self.weight, f"one of {', '.join(WEIGHTS)}, or a function of a micro-batch")
        if not (self.recover is None or isinstance(self.recover, bool)):
            raise InvalidValue("recover", self.recover, "True, False, or None for with a single process only")

    def limits(self, **differing: Any) -> SearchLimits:
        """What bounds a search; `differing` is what a stage and its data add to it."""
        # A split batch's last micro-batch may be one sample.
        return super().limits(**{"from_two": not self.split_batches, **differing})


_SHARDING = ("FSDPStrategy", "ModelParallelStrategy")
_OTHER_FINDERS = ("BatchSizeFinder",)
_FINDER = "batchfinder.lightning.callback.BatchFinder"


def check_trainer(trainer: Trainer, options: FinderOptions) -> None:
    """Refuse a trainer, set up, that cannot be served.

    Raises:
        MisconfigurationException: says what is in the way and what to do instead.
    """
    strategy, callbacks = trainer.strategy, callbacks_of(trainer)
    several = trainer.world_size > 1 and not is_a(strategy, "DDPStrategy", *_SHARDING)
    if several or is_a(strategy, "DeepSpeedStrategy"):
        raise MisconfigurationException(
            "BatchFinder serves several devices under DDP, FSDP and ModelParallelStrategy, and this trainer has "
            f"{trainer.world_size} under {type(strategy).__name__}, whose state could not be put back after a try. "
            "Pass Trainer(strategy='ddp') or 'fsdp', or run it once with Trainer(devices=1), then set the size that it "
            "reports by hand and remove the callback."
        )
    if options.split_batches and is_a(strategy, *_SHARDING):
        raise MisconfigurationException(
            "BatchFinder(split_batches=True) makes as many micro-batches as a rank's lengths ask for, and under "
            f"{type(strategy).__name__} all ranks gather their shards in each. Leave split_batches out."
        )
    if trainer.strategy.root_device.type not in ("cpu", "cuda"):
        raise MisconfigurationException(
            f"BatchFinder can limit and measure the memory of CUDA devices and of the CPU, and this trainer's device "
            f"is {trainer.strategy.root_device}. Pass Trainer(accelerator='cpu') or 'gpu', or remove the callback."
        )
    names = [{f"{base.__module__}.{base.__name__}" for base in type(callback).__mro__} for callback in callbacks]
    if sum(_FINDER in bases for bases in names) > 1:
        raise MisconfigurationException(
            "This trainer has more than one BatchFinder, and each would set the batch size. Keep one of them."
        )
    others = [type(callback).__name__ for callback in callbacks if is_a(callback, *_OTHER_FINDERS)]
    if others:
        raise MisconfigurationException(
            f"BatchFinder and {others[0]} would both set the batch size. Remove {others[0]} from "
            "Trainer(callbacks=...)."
        )
    if trainer.state.fn != "fit":
        return
    module, target = trainer.lightning_module, options.target_batch_size
    scheduled = any(is_a(callback, "GradientAccumulationScheduler") for callback in callbacks)
    if options.split_batches:
        split = "BatchFinder(split_batches=True)"
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"{split} cannot split batches for {type(module).__name__}, which optimizes manually: its "
                "training_step decides what runs backward and when to step. Leave split_batches out, or call "
                "batchfinder.split_batch in training_step."
            )
        if scheduled:
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
    elif target is not None:
        if scheduled:
            raise MisconfigurationException(
                f"BatchFinder(target_batch_size={target}) and GradientAccumulationScheduler would both set how many "
                "batches are accumulated. Remove the scheduler, or the target."
            )
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"BatchFinder(target_batch_size={target}) cannot accumulate for a model with manual optimization: its "
                "training_step decides when to step. Leave out target_batch_size; "
                f"batchfinder.plan_accumulation({target}, finder.batch_size) says what to accumulate."
            )
