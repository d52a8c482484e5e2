"""The name under which an answer is kept: everything that changes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.lightning.compat import package_of
from batchfinder.lightning.dry_run import Setting
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.key_fields import describe_batch, measured_in, optimizer_options, versions
from batchfinder.measure.tuner import SearchLimits
from batchfinder.models.fingerprint import fingerprint
from batchfinder.results import Shape
from batchfinder.training.workload import Workload


def make_key(
    trainer: Any,
    setting: Setting,
    shape: Shape,
    sample: Any,
    memory: Memory,
    limits: SearchLimits,
    callbacks: Iterable[Any],
) -> CacheKey:
    """Name everything that changes the answer.

    Args:
        trainer: set up.
        setting: what is tried.
        shape: one sample's shape.
        sample: a batch of one sample: the data's own shapes and types, which the model's code may not tell.
        memory: the device's memory.
        limits: what bounds the search.
        callbacks: those that take part.
    """
    module = trainer.lightning_module
    optimizers = [] if setting.alone else trainer.optimizers
    train = setting.train
    extra: dict[str, Json] = {
        "sample": describe_batch(sample),
        "stage": [setting.stage, setting.alone],
        "target": setting.target_batch_size,
        "split": setting.split_batch_size,
        "train": None if train is None else [train[0], train[1].seq_len],
        "headroom": limits.headroom,
        "strategy": type(trainer.strategy).__name__,
        "automatic_optimization": module.automatic_optimization,
        "clip": [trainer.gradient_clip_val, str(trainer.gradient_clip_algorithm)],
        "detect_anomaly": trainer._detect_anomaly,
        "callbacks": sorted(type(callback).__qualname__ for callback in callbacks),
        "threads": torch.get_num_threads() if trainer.strategy.root_device.type == "cpu" else None,
        "compiled": module._compiler_ctx is not None,
    }
    return CacheKey(
        **measured_in(memory, limits, trainer.strategy.root_device, shape, optimizers),
        model=fingerprint(Workload(module, _no_batches)),
        mode="train" if setting.stage == "fit" else "inference",
        precision=str(trainer.precision),
        optimizer_options={str(index): optimizer_options(optimizer) for index, optimizer in enumerate(optimizers)},
        attention="",
        gradient_checkpointing=False,
        accumulation=setting.accumulation,
        floor=1,
        multiple_of=1,
        versions=versions(package_of(trainer).partition(".")[0].replace("_", "-")),
        extra=extra,
    )


def _no_batches(batch_size: int, seq_len: int | None) -> None:
    """Stands for the batches in a fingerprint; the key holds a sample's shape instead."""
