"""The key under which the result of a training loop is cached: what changes the memory that a step takes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.loop.options import LoopConfig
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.key_fields import describe_batch, measured_key_fields, versions
from batchfinder.measure.tuner import SearchLimits
from batchfinder.models.fingerprint import fingerprint_module, fingerprint_optimizer
from batchfinder.results import Shape


def make_key(config: LoopConfig, shape: Shape, sample: Any, memory: Memory, limits: SearchLimits) -> CacheKey:
    """The key of a loop; `sample` is a batch of the smallest size, for the shapes and dtypes of the data."""
    device, optimizers = config.device, config.optimizers
    modules = [item for item in config.state if isinstance(item, nn.Module)]
    extra: dict[str, Json] = {
        "sample": describe_batch(sample),
        "loop": [f"{type(item).__module__}.{type(item).__qualname__}" for item in config.state],
        "target": limits.target_batch_size,
        "headroom": limits.headroom,
        "training": [[name for name, part in module.named_modules() if part.training] for module in modules],
        "compiled": [any(part._compiled_call_impl is not None for part in module.modules()) for module in modules],
        "settings": process_settings(device),
    }
    return CacheKey(
        **measured_key_fields(memory, limits, device, shape, optimizers),
        model=fingerprint_module(nn.ModuleList(modules), config.make_batch, config.train_step),
        mode="train",
        precision="as train_step has it",
        optimizer_options={str(index): fingerprint_optimizer(optimizer) for index, optimizer in enumerate(optimizers)},
        attention="",
        gradient_checkpointing=False,
        accumulation=1,
        versions=versions(),
        extra=extra,
    )


def process_settings(device: torch.device) -> dict[str, Json]:
    """What the process has set for every step on a device: autocast, dtypes, kernels, threads."""
    kind = device.type
    found: dict[str, Json] = {
        "autocast": [torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))],
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": torch.is_anomaly_enabled(),
    }
    if kind == "cpu":
        return {**found, "threads": torch.get_num_threads()}
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        **found,
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.version()],
        "attention": [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()],
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
