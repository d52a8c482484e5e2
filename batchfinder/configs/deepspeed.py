"""DeepSpeed's JSON: https://www.deepspeed.ai/docs/config-json/. Other tools' configs name such a file, or hold one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchfinder.configs.files import read_mapping
from batchfinder.configs.record import TrainingConfig

TOOL = "DeepSpeed"
KEYS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "FusedAdam": "adamw-fused", "Lamb": "adamw", "OneBitAdam": "adamw"}


def read(config: TrainingConfig) -> None:
    """Sizes, precision, optimizer and stage; the number of GPUs where the sizes imply it."""
    config.micro_batch = config.size("train_micro_batch_size_per_gpu")
    config.accumulation = config.size("gradient_accumulation_steps", 1)
    config.effective = config.size("train_batch_size")
    micro, whole = config.micro_batch.value, config.effective.value
    if micro is not None and whole is not None:
        config.gpus = max(1, whole // (micro * (config.accumulation.value or 1)))
        if not config.accumulation.stated:
            config.notes.append(f"train_batch_size {whole} with {micro} on a GPU is taken to mean {config.gpus} GPUs")
    config.set("precision", "fp32")
    if "auto" in (config.get("bf16.enabled"), config.get("fp16.enabled")):
        config.options.pop("precision")
        config.notes.append("auto is for the Trainer to fill in, by what it is told: --precision, --batch-size")
    for name, precision in (("bf16", "bf16-mixed"), ("bfloat16", "bf16-mixed"), ("fp16", "16-mixed")):
        if config.get(f"{name}.enabled") is True:
            config.set("precision", precision, f"{name}.enabled")
    if (kind := config.get("optimizer.type")) is not None:
        config.optimizer(str(kind), "optimizer.type", _OPTIMIZERS)
    read_zero(config, config.values, "")


def read_zero(config: TrainingConfig, values: Mapping[str, Any], prefix: str) -> None:
    """The stage, and what it moves to the CPU; `prefix` stands before the keys in messages."""
    zero = values.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return
    config.zero(zero.get("stage"), f"{prefix}zero_optimization.stage")
    for name, what in (("offload_optimizer", "the optimizer's state"), ("offload_param", "parameters")):
        device = zero.get(name)
        if isinstance(device, Mapping) and device.get("device") not in (None, "none"):
            config.left_out[f"{prefix}zero_optimization.{name}"] = f"{what} in the CPU's memory; here on the GPU"
    if zero.get("cpu_offload"):
        config.left_out[f"{prefix}zero_optimization.cpu_offload"] = "states in the CPU's memory; here on the GPU"


def read_named(config: TrainingConfig, key: str, folder: Path) -> None:
    """What a key of another tool's config holds: a DeepSpeed config, or the path of one."""
    held = config.get(key)
    if isinstance(held, Mapping):
        read_zero(config, held, f"{key}.")
    elif isinstance(held, str) and held:
        for path in (Path(held), folder / held):
            try:
                read_zero(config, read_mapping(path.read_text(), path.name), f"{held}: ")
            except (OSError, ValueError):
                continue
            return
        config.left_out[key] = f"{held} cannot be read here: --strategy zero1, zero2 or fsdp2 stand for its stages"
