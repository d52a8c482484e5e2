"""One optimizer step as `Trainer` takes it, its batches, and the key under which the result for a Trainer is cached."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.data.longest_samples import UnreadableData, batches_of
from batchfinder.data.sequence_dim import find_sequence
from batchfinder.errors import InvalidValue
from batchfinder.loop.options import LoopConfig
from batchfinder.loop.tune import process_settings
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.key_fields import describe_batch, describe_sharding, measured_key_fields, versions
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
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, micro_batches: Any) -> None:
        """Take one step with an iterable of micro-batches that has a length."""
        trainer = self._trainer
        args, model, count = trainer.args, trainer.model_wrapped, len(micro_batches)
        batches, num_items = trainer.get_batch_samples(iter(micro_batches), count, args.device)
        # Copies in place of the micro-batches that a real step would have fetched as well.
        missing = range(micro_batches.of + 1 - len(batches))
        held = [pytree.tree_map_only(torch.Tensor, torch.clone, batches[-1]) for _ in missing]
        trainer.current_gradient_accumulation_steps = len(batches)
        self._call_back("on_step_begin")
        for index, inputs in enumerate(batches):
            last = index == len(batches) - 1
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else trainer.accelerator.no_sync(model=model):
                trainer.training_step(model, inputs, num_items)
            if not last:
                self._call_back("on_substep_end")
                micro_batches.ended()
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

    The trainer is about to train, all prepared, with the callbacks that take part; `sample` is a batch of the smallest
    size, for the shapes and dtypes of the data.
    """
    args, model, optimizers = trainer.args, trainer.model_wrapped, config.optimizers
    arguments = {name: getattr(args, name, None) for name in ARGUMENTS}
    extra: dict[str, Json] = {
        "sample": describe_batch(sample),
        "trainer": f"{type(trainer).__module__}.{type(trainer).__qualname__}",
        "arguments": {
            name: value if value is None or isinstance(value, bool | int | float | str) else repr(value)
            for name, value in arguments.items()
        },
        "target": limits.target_batch_size,
        "headroom": limits.headroom,
        "clip": bool(args.max_grad_norm and args.max_grad_norm > 0),
        "phases": [*config.phases.described, args.eval_batch_size if config.phases.evaluate else None],
        "training": [name for name, part in model.named_modules() if part.training],
        "compiled": any(part._compiled_call_impl is not None for part in model.modules()),
        "optimizer": str(getattr(args, "optim", "")),
        "state": [f"{type(item).__module__}.{type(item).__qualname__}" for item in config.state],
        "callbacks": [type(callback).__qualname__ for callback in trainer.callback_handler.callbacks],
        "settings": process_settings(config.device),
        **describe_sharding([model]),
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


MakeBatch = Callable[[int, int | None], Any]

_MAKE_BATCH = "or tune_trainer(make_batch=), a function that makes a batch of (batch_size, seq_len)"


def own_loader(trainer: Trainer) -> Any:
    """The loader that training would read.

    Args:
        trainer: any. Its arguments are changed while the loader is made, and put back.

    Raises:
        InvalidValue: the loader's batches do not have the size that the trainer sets.
    """
    size, per_device = trainer._train_batch_size, trainer.args.per_device_train_batch_size
    asked = size - 1 if size > 1 else 2
    try:
        set_size(trainer, asked)
        loader = trainer.get_train_dataloader()
    finally:
        set_size(trainer, per_device)
    sampler = getattr(loader, "batch_sampler", None)
    has = getattr(loader if sampler is None else sampler, "batch_size", None)
    if has != asked:
        raise InvalidValue(
            "get_train_dataloader",
            f"batches of {has} where trainer._train_batch_size is {asked}",
            "a loader whose batch size is trainer._train_batch_size, which tune_trainer sets",
        )
    return loader


def set_size(trainer: Trainer, batch_size: int) -> None:
    """Have the trainer make its training loader with so many samples per micro-batch."""
    trainer.args.per_device_train_batch_size = batch_size
    trainer._train_batch_size = trainer.args.train_batch_size


class TrainerBatches:
    """Makes batches to try sizes with, on the device where the trainer's loader puts them.

    The loader is never iterated: samples are read from the dataset in this process and given to the collator. Where
    samples vary in length the longest ones seen make up the batch.

    Args:
        loader: from `own_loader`.
        make_batch: makes a batch of (batch_size, seq_len) instead.
    """

    def __init__(self, loader: Any, make_batch: MakeBatch | None) -> None:
        self._device = getattr(loader, "device", None)
        self._make_batch = make_batch
        self._dataset = getattr(loader, "dataset", loader)
        self._batches = batches_of(loader)

    def __call__(self, batch_size: int, seq_len: int | None) -> Any:
        """Make one batch.

        It is stretched or cut to `seq_len`; None is for that of the longest samples.

        Raises:
            InvalidValue: the data do not tell how to make one, or can be read only once.
        """
        try:
            if self._make_batch is not None:
                batch = self._make_batch(batch_size, seq_len)
            else:
                batch = self._batches.batch(batch_size, longest=seq_len is None)
                if batch is None:
                    raise InvalidValue(
                        "train_dataset",
                        "batches without a tensor",
                        f"batches that tell how many samples they have, {_MAKE_BATCH}",
                    )
                if seq_len is not None:
                    found = find_sequence(*self._batches.extremes(longest=False))
                    if isinstance(found, str):
                        raise InvalidValue(
                            "seq_len",
                            seq_len,
                            f"None, since it cannot be seen which dimension is the sequence: {found}; {_MAKE_BATCH}",
                        )
                    batch = found.stretch(batch, seq_len)
        except UnreadableData:
            raise InvalidValue(
                "train_dataset",
                type(self._dataset).__name__,
                "at least one sample, in data that can be read more than once, since what is read to try sizes with "
                f"would be missing from the training; {_MAKE_BATCH}",
            ) from None
        return self._on_device(batch)

    def varies(self) -> bool:
        """Whether samples differ in length, as far as that can be told."""
        with suppress(UnreadableData):  # which making a batch says
            return self._make_batch is None and self._batches.varies()
        return False

    def others(self, batch_size: int) -> list[Callable[[], Any]]:
        """Make the batches of other lengths that an epoch has beside full ones of the longest samples."""

        def moved(make: Callable[[], Any]) -> Any:
            return self._on_device(make())

        return [partial(moved, make) for make in self._batches.others(batch_size)]

    def _on_device(self, batch: Any) -> Any:
        from accelerate.utils import send_to_device

        return batch if self._device is None else send_to_device(batch, self._device)
