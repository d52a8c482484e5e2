"""What a cache's key says of the circumstances of real steps, as JSON values."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from batchfinder.cache.key import Json
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.tuner import SearchLimits
from batchfinder.results import Shape

_CACHING = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MALLOC = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")


def measured_in(
    memory: Memory, limits: SearchLimits, device: torch.device, shape: Shape, optimizers: Sequence[Any]
) -> dict[str, Any]:
    """The fields of a `CacheKey` that mean the same for all real steps, whoever takes them.

    Args:
        memory: the device's memory.
        limits: what bounds the search.
        device: where steps run.
        shape: one sample's shape.
        optimizers: those that step.
    """
    return {
        "gpu": memory.name,
        "total_bytes": memory.total_bytes,
        "usable_bytes": memory.allowance_bytes,
        "seq_len": shape.seq_len,
        "optimizer": " + ".join(type(optimizer).__name__ for optimizer in optimizers),
        "allocator": allocator_settings(device),
        "max_batch_size": limits.cap,
        "tolerance": limits.tolerance,
        "headroom_bytes": limits.reserve_bytes if isinstance(limits.headroom, int) else 0,
        "source": "measured",
    }


def describe_batch(sample: Any) -> Json:
    """Shapes and types of a batch's tensors, by their places.

    Args:
        sample: a batch of a single sample.
    """
    leaves = pytree.tree_leaves_with_path(sample)
    return [
        [pytree.keystr(path), [*leaf.shape], str(leaf.dtype)] if isinstance(leaf, torch.Tensor) else pytree.keystr(path)
        for path, leaf in leaves
    ]


def optimizer_options(optimizer: Any) -> dict[str, Json]:
    """What an optimizer was made with; schedulers do not change it.

    Args:
        optimizer: any of torch's kind.
    """
    return {name: value if _is_json(value) else repr(value) for name, value in optimizer.defaults.items()}


def allocator_settings(device: torch.device) -> dict[str, Json]:
    """The environment that changes how a device's allocator works.

    Args:
        device: a CUDA device or the CPU.
    """
    names = _CACHING if device.type == "cuda" else _MALLOC
    return {name: os.environ[name] for name in names if name in os.environ}


def versions(*packages: str) -> dict[str, Json]:
    """Versions of PyTorch, of batchfinder and of other packages.

    Args:
        packages: names as pip has them.
    """
    found: dict[str, Json] = {"torch": torch.__version__}
    for name in ("batchfinder", *packages):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and abs(value) < 1e300)
