"""A transformers Trainer as a workload, and what TrainingArguments say about a step.

Nothing of transformers is imported before there is a Trainer or TrainingArguments, which the user's own code has made.
The Trainer's `train` does not run: what it does before the first step and changes its memory is done here.

Source: `train` and `training_step` of the Trainer in transformers 5.23, `Accelerator.prepare_model` in accelerate 1.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from batchfinder.errors import InvalidValue
from batchfinder.training.optimizers import OptimizerFactory
from batchfinder.training.spec import OPTIMIZER_NAMES
from batchfinder.training.step import Workload
from batchfinder.training.synonyms import one_of

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

_OF_OUR_NAMES = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_4bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"),
    *("schedule_free_adamw", "sgd"),
)
"""Of `TrainingArguments.optim` those that we have by a name; the classes of all others are taken as they are."""

_OF_LIBRARIES = ("adamw-4bit", "adamw-8bit", "paged-adamw-8bit", "schedule-free")
_LIBRARY = "transformers."
_PRECISIONS = {"no": "fp32", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def is_trainer(thing: object) -> bool:
    """Whether this is a `transformers.Trainer`, or of a class derived from it."""
    module: Any = sys.modules.get("transformers.trainer")
    return module is not None and isinstance(thing, module.Trainer)


def is_config(thing: object) -> bool:
    """Whether this is a config of transformers."""
    module: Any = sys.modules.get("transformers.configuration_utils")
    return module is not None and isinstance(thing, module.PreTrainedConfig)


def check_trainer(trainer: Trainer) -> None:
    """Refuse a Trainer that is not one of a model whole on each GPU.

    Raises:
        InvalidValue: says what to do instead.
    """
    if trainer.train_dataset is None:
        raise InvalidValue("train_dataset", None, "the data that trainer.train() will read, to make batches of")
    sharded = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "a model on several devices": trainer.is_model_parallel,
    }
    for name, enabled in sharded.items():
        if enabled:
            expected = "a model that is whole on one device; `batchfinder dry-run` runs a script with any of them"
            raise InvalidValue("the trainer's parallelism", name, expected)


def precision_of(mixed_precision: str) -> str:
    """One of `PRECISION_NAMES` for accelerate's `mixed_precision`.

    Raises:
        InvalidValue: it is another, such as fp8.
    """
    if mixed_precision not in _PRECISIONS:
        raise InvalidValue("mixed_precision", mixed_precision, f"one of {', '.join(_PRECISIONS)}")
    return _PRECISIONS[mixed_precision]


def mixed_precision_of(arguments: TrainingArguments) -> str:
    """What accelerate calls the precision that TrainingArguments ask for."""
    return "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no"


def optimizer_name(arguments: TrainingArguments) -> str:
    """The one of `OPTIMIZER_NAMES` that TrainingArguments name; `adamw` where we have none of that name."""
    name = _optim(arguments)
    return one_of("optimizer", name, OPTIMIZER_NAMES) if name in _OF_OUR_NAMES else "adamw"


def optimizer_of(arguments: TrainingArguments, model: nn.Module | None) -> str | OptimizerFactory:
    """One of `OPTIMIZER_NAMES`, or what makes the optimizer that TrainingArguments name.

    Raises:
        InvalidValue: it cannot be made, as that of a package that is not installed.
    """
    name = _optim(arguments)
    if name in _OF_OUR_NAMES:
        return optimizer_name(arguments)
    from transformers import Trainer

    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, model)  # type: ignore[arg-type]
    except (ImportError, ValueError, RuntimeError) as error:
        expected = f"an optimizer whose package is here, or optimizer= ({' '.join(str(error).split())})"
        raise InvalidValue("optim", name, expected) from error
    return lambda parameters: kind(list(parameters), **settings)


def prepare_model(model: nn.Module, arguments: TrainingArguments, mixed: bool) -> nn.Module:
    """Do to a model at hand, in place, what a Trainer of these arguments does to it before the first step.

    With mixed precision its forward alone is autocast, and what it returns is converted to fp32. Returns the module to
    call.
    """
    any_model: Any = model
    if getattr(any_model, "config", None) is not None and hasattr(arguments, "use_cache"):
        any_model.config.use_cache = arguments.use_cache
    if arguments.use_liger_kernel:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(any_model, arguments.liger_kernel_config)  # type: ignore[no-untyped-call]
    if _checkpoints(arguments):
        settings = _checkpointing(arguments)
        every, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
        if hasattr(any_model, "activation_checkpointing_enable"):
            any_model.activation_checkpointing_enable(settings or None, every_n_layers=every, offload=offload)
        else:
            any_model.gradient_checkpointing_enable(settings or None)
    if mixed:
        model.forward = _in_half(getattr(model, "_original_forward", model.forward))  # as it was before it trained
    if arguments.torch_compile:
        return torch.compile(model)  # type: ignore[return-value]
    return model


def prepare_workload(workload: Workload, arguments: TrainingArguments, mixed: bool) -> Workload:
    """A workload whose model is prepared as a Trainer of these arguments would prepare it, by `prepare_model`."""
    model = prepare_model(workload.model, arguments, mixed)
    smoothing = arguments.label_smoothing_factor
    words = ["the loss of label_smoothing_factor: the model's own is taken"] if smoothing else []
    return replace(workload, model=model, assumptions=(*workload.assumptions, *_left_out(arguments), *words))


def workload_from_trainer(
    trainer: Trainer, make_batch: Callable[[int, int | None], Any], mixed: bool, accumulation: int
) -> Workload:
    """Make a workload of a Trainer: its `compute_loss`, its model as it prepares it, and its optimizer.

    The trainer is changed, and its model moved where the workload's is.

    Args:
        trainer: with training data.
        make_batch: makes what its loader would give.
        mixed: whether its forward runs in mixed precision.
        accumulation: micro-batches of an optimizer step, which are all fetched before the first of them runs, with one
            more.
    """
    model: Any = trainer.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given: Any = trainer.optimizer
        if given is None:
            made: torch.optim.Optimizer = trainer.create_optimizer()
            return made
        optimizer: torch.optim.Optimizer = getattr(given, "optimizer", given)  # accelerate wraps one that has trained
        moved = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [moved[names[id(each)]] if id(each) in names else each for each in group["params"]]
        return optimizer

    named = optimizer_name(trainer.args)
    step = type(trainer).training_step
    own = (
        []
        if step.__module__.startswith(_LIBRARY)
        else [f"{step.__qualname__}: compute_loss and a backward run instead"]
    )
    makes_its_own = trainer.optimizer is not None or not type(trainer).create_optimizer.__module__.startswith(_LIBRARY)
    by_name = named in _OF_LIBRARIES and not makes_its_own and trainer.optimizer_cls_and_kwargs is None
    return Workload(
        TrainerLoss(trainer, prepare_model(model, trainer.args, mixed)),
        lambda batch_size, seq_len: (made := make_batch(batch_size, seq_len), [made] * accumulation),
        optimizer=None if by_name else make_optimizer,
        assumptions=(*_left_out(trainer.args), *own),
    )


class TrainerLoss(nn.Module):
    """A module whose forward is a Trainer's `compute_loss`, outside of autocast but for the model itself."""

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._trainer = trainer

    def forward(self, inputs: Any, others: list[Any]) -> Any:
        """The loss of a micro-batch on the device; `others` are held beside it."""
        trainer = self._trainer
        _, items = trainer.get_batch_samples(iter([inputs, *others[1:]]), len(others), _device_of(inputs))
        kind = _device_of(inputs).type
        with torch.autocast(kind, enabled=False):
            given = dict(inputs) if isinstance(inputs, Mapping) else inputs
            return trainer.compute_loss(self.model, given, num_items_in_batch=items)


def _device_of(batch: Any) -> torch.device:
    return next(leaf.device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _in_half(forward: Callable[..., Any]) -> Callable[..., Any]:
    from accelerate.utils import convert_outputs_to_fp32

    def autocast(*args: Any, **kwargs: Any) -> Any:
        kind = _device_of((args, kwargs)).type
        with torch.autocast(kind, torch.get_autocast_dtype(kind)):
            return forward(*args, **kwargs)

    converted: Callable[..., Any] = convert_outputs_to_fp32(autocast)
    return converted


def _checkpoints(arguments: Any) -> bool:
    return bool(getattr(arguments, "activation_checkpointing", None) or arguments.gradient_checkpointing)


def _checkpointing(arguments: Any) -> dict[str, Any]:
    newer = getattr(arguments, "activation_checkpointing_kwargs", None)
    return dict(newer or arguments.gradient_checkpointing_kwargs or {})


def _optim(arguments: Any) -> str:
    return str(getattr(arguments.optim, "value", arguments.optim))


def _left_out(arguments: Any) -> list[str]:
    return ["the noise of neftune_noise_alpha"] if arguments.neftune_noise_alpha is not None else []
