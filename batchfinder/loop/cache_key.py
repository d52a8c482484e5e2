"""The name under which an answer is kept: everything that changes it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from batchfinder.cache import CacheKey
from batchfinder.cache.key import Json
from batchfinder.loop.options import Setting
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.key_fields import describe_batch, measured_in, optimizer_options, versions
from batchfinder.measure.tuner import SearchLimits
from batchfinder.models.fingerprint import fingerprint
from batchfinder.results import Shape
from batchfinder.training.workload import Workload


def make_key(setting: Setting, shape: Shape, sample: Any, memory: Memory, limits: SearchLimits) -> CacheKey:
    """Name everything that changes the answer.

    Args:
        setting: what is tried.
        shape: one sample's shape.
        sample: a batch of the smallest size: the data's own shapes and types, which no code may tell.
        memory: the device's memory.
        limits: what bounds the search.
    """
    device, state = setting.device, setting.state
    loss: Any = setting.train_step  # in a loop the loss is a part of it
    modules = [item for item in state if isinstance(item, nn.Module)]
    optimizers = [item for item in state if isinstance(item, Optimizer)]
    extra: dict[str, Json] = {
        "sample": describe_batch(sample),
        "loop": [f"{type(item).__module__}.{type(item).__qualname__}" for item in state],
        "target": setting.target_batch_size,
        "headroom": limits.headroom,
        "training": [[name for name, part in module.named_modules() if part.training] for module in modules],
        "groups": [group_switches(optimizer) for optimizer in optimizers],
        "compiled": [any(part._compiled_call_impl is not None for part in module.modules()) for module in modules],
        "settings": process_settings(device),
    }
    return CacheKey(
        **measured_in(memory, limits, device, shape, optimizers),
        model=fingerprint(Workload(nn.ModuleList(modules), setting.make_batch, loss)),
        mode="train",
        precision="as train_step has it",
        optimizer_options={str(index): optimizer_options(optimizer) for index, optimizer in enumerate(optimizers)},
        attention="",
        gradient_checkpointing=False,
        accumulation=1,
        floor=setting.min_batch_size,
        multiple_of=setting.multiple_of,
        versions=versions(),
        extra=extra,
    )


def group_switches(optimizer: Optimizer) -> Json:
    """How many parameters each group of an optimizer has, and its switches; learning rates change nothing.

    Args:
        optimizer: any of torch's kind.
    """
    return [_group(group) for group in optimizer.param_groups]


def process_settings(device: torch.device) -> dict[str, Json]:
    """What the process has set for every step.

    Args:
        device: where steps run.
    """
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


def _group(group: dict[str, Any]) -> Json:
    switches = {name: value for name, value in group.items() if value is None or isinstance(value, bool)}
    return [len(group["params"]), switches]
