"""One optimizer step as `Trainer` takes it, and the key under which the result for a Trainer is cached."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.huggingface.batches import TrainerBatches
from batchfinder.loop.cache_key import process_settings
from batchfinder.loop.options import LoopConfig
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.key_fields import describe_batch, measured_key_fields, versions
from batchfinder.measure.tuner import SearchLimits
from batchfinder.models.fingerprint import fingerprint_module, fingerprint_optimizer
from batchfinder.results import Shape

if TYPE_CHECKING:
    from transformers import Trainer


class TrainerStep:
    """Takes optimizer steps with a trainer's own `training_step`.

    As in training, all micro-batches of a step are fetched, and moved to the device, before the first of them runs,
    and accelerate's loader has fetched one more: so as many copies are held as a step has micro-batches that are not
    run here.

    Source: `Trainer._run_epoch` in transformers 5.23, `DataLoaderShard.__iter__` in accelerate 1.15.

    Args:
        trainer: about to train.
        batches: what makes the micro-batches.
        target_batch_size: samples per optimizer step.
    """

    def __init__(self, trainer: Trainer, batches: TrainerBatches, target_batch_size: int) -> None:
        self._trainer = trainer
        self._batches = batches
        self._target_batch_size = target_batch_size

    def __call__(self, micro_batches: Any) -> None:
        """Take one step.

        Args:
            micro_batches: an iterable that has a length.
        """
        trainer = self._trainer
        args, model, count = trainer.args, trainer.model_wrapped, len(micro_batches)
        batches, num_items = trainer.get_batch_samples(iter(micro_batches), count, args.device)
        held = self._not_run(batches)
        trainer.current_gradient_accumulation_steps = len(batches)
        self._call_back("on_step_begin")
        for index, inputs in enumerate(batches):
            last = index == len(batches) - 1
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else trainer.accelerator.no_sync(model=model):
                trainer.training_step(model, inputs, num_items)
            if not last:
                self._call_back("on_substep_end")
        limit = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else float("inf")
        trainer.accelerator.clip_grad_norm_(model.parameters(), limit)
        self._call_back("on_pre_optimizer_step")
        assert trainer.optimizer is not None  # train() has made it
        trainer.optimizer.step()
        self._call_back("on_optimizer_step")
        model.zero_grad()
        self._call_back("on_step_end")
        del held

    def _call_back(self, event: str) -> None:
        trainer = self._trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _not_run(self, batches: Sequence[Any]) -> list[Any]:
        """Copies in place of the micro-batches that a real step would have fetched as well."""
        window = -(-self._target_batch_size // self._batches.made)
        return [pytree.tree_map_only(torch.Tensor, torch.clone, batches[-1]) for _ in range(window + 1 - len(batches))]


ARGUMENTS = (
    "activation_checkpointing_kwargs",
    "average_tokens_across_devices",
    "dataloader_pin_memory",
    "full_determinism",
    "gradient_checkpointing_kwargs",
    "label_smoothing_factor",
    "liger_kernel_config",
    "neftune_noise_alpha",
    "optim_args",
    "torch_compile_backend",
    "torch_compile_mode",
    "torch_empty_cache_steps",
    "use_cache",
    "use_liger_kernel",
)
"""The training arguments that change what a step takes, beside what the prepared model and optimizer show."""


def make_key(
    trainer: Trainer, config: LoopConfig, shape: Shape, sample: Any, memory: Memory, limits: SearchLimits
) -> CacheKey:
    """The key of a Trainer: what changes the memory that a step takes.

    Args:
        trainer: about to train, all prepared, with the callbacks that take part.
        config: the trainer as a loop.
        shape: one sample's shape.
        sample: a batch of the smallest size, for the shapes and dtypes of the data.
        memory: the device's memory.
        limits: what bounds the search.
    """
    args, model, optimizers = trainer.args, trainer.model_wrapped, config.optimizers
    extra: dict[str, Json] = {
        "sample": describe_batch(sample),
        "trainer": f"{type(trainer).__module__}.{type(trainer).__qualname__}",
        "arguments": {name: _json(getattr(args, name, None)) for name in ARGUMENTS},
        "target": limits.target_batch_size,
        "headroom": limits.headroom,
        "clip": bool(args.max_grad_norm and args.max_grad_norm > 0),
        "training": [name for name, part in model.named_modules() if part.training],
        "compiled": any(part._compiled_call_impl is not None for part in model.modules()),
        "optimizer": str(getattr(args, "optim", "")),
        "state": [f"{type(item).__module__}.{type(item).__qualname__}" for item in config.state],
        "callbacks": [type(callback).__qualname__ for callback in trainer.callback_handler.callbacks],
        "settings": process_settings(config.device),
    }
    return CacheKey(
        **measured_key_fields(memory, limits, config.device, shape, optimizers),
        model=fingerprint_module(model, trainer, trainer.data_collator, trainer.compute_loss_func),
        mode="train",
        precision=str(trainer.accelerator.mixed_precision),
        optimizer_options={str(index): fingerprint_optimizer(optimizer) for index, optimizer in enumerate(optimizers)},
        attention=str(getattr(getattr(model, "config", None), "_attn_implementation", "") or ""),
        gradient_checkpointing=bool(getattr(args, "activation_checkpointing", False))
        or bool(getattr(args, "gradient_checkpointing", False)),
        accumulation=1,
        versions=versions("transformers", "accelerate"),
        extra=extra,
    )


def _json(value: Any) -> Json:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
