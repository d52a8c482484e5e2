"""The name under which an answer is kept: everything that changes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Callback

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.lightning.compat import compiler_context, detects_anomaly, package_of
from batchfinder.lightning.dry_run import TrialConfig
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.key_fields import describe_batch, measured_key_fields, versions
from batchfinder.measure.tuner import SearchLimits
from batchfinder.models.fingerprint import fingerprint_module, fingerprint_optimizer
from batchfinder.results import Shape


def make_key(
    trainer: Trainer,
    config: TrialConfig,
    shape: Shape,
    sample: Any,
    memory: Memory,
    limits: SearchLimits,
    callbacks: Iterable[Callback],
) -> CacheKey:
    """Name everything that changes the answer.

    `sample` is a batch of one sample: the data's own shapes and types, which the model's code may not tell. `callbacks`
    are those that take part in the tries.
    """
    module = trainer.lightning_module
    optimizers = [] if config.alone else trainer.optimizers
    train = config.train
    extra: dict[str, Json] = {
        "sample": describe_batch(sample),
        "stage": [config.stage, config.alone],
        "target": config.target_batch_size,
        "split": config.split_batch_size,
        "train": None if train is None else [train.batch_size, train.shape.seq_len],
        "headroom": limits.headroom,
        "strategy": type(trainer.strategy).__name__,
        "automatic_optimization": module.automatic_optimization,
        "clip": bool(trainer.gradient_clip_val) and str(trainer.gradient_clip_algorithm),
        "detect_anomaly": detects_anomaly(trainer),
        "callbacks": sorted(type(callback).__qualname__ for callback in callbacks),
        "threads": torch.get_num_threads() if trainer.strategy.root_device.type == "cpu" else None,
        "compiled": compiler_context(module) is not None,
    }
    return CacheKey(
        **measured_key_fields(memory, limits, trainer.strategy.root_device, shape, optimizers),
        model=fingerprint_module(module),
        mode="train" if config.stage == "fit" else "inference",
        precision=str(trainer.precision),
        optimizer_options={str(index): fingerprint_optimizer(optimizer) for index, optimizer in enumerate(optimizers)},
        attention="",
        gradient_checkpointing=False,
        accumulation=config.accumulation,
        versions=versions(package_of(trainer).partition(".")[0].replace("_", "-")),
        extra=extra,
    )
