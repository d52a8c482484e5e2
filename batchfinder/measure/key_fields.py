"""The fields of a cache key that all measured results share, as JSON values."""

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
from batchfinder.simulator.alloc_conf import VARIABLES

_MALLOC = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")


def measured_key_fields(
    memory: Memory, limits: SearchLimits, device: torch.device, shape: Shape, optimizers: Sequence[Any]
) -> dict[str, Any]:
    """The device, the search's limits and the optimizers, as fields of a `CacheKey`."""
    # The environment variables that change how the device's allocator works.
    variables = VARIABLES if device.type == "cuda" else _MALLOC
    return {
        "gpu": memory.name,
        "total_bytes": memory.total_bytes,
        "usable_bytes": memory.allowance_bytes,
        "seq_len": shape.seq_len,
        "optimizer": " + ".join(type(optimizer).__name__ for optimizer in optimizers),
        "allocator": {name: os.environ[name] for name in variables if name in os.environ},
        "max_batch_size": limits.cap,
        "floor": limits.min_batch_size,
        "multiple_of": limits.multiple_of,
        "tolerance": limits.tolerance,
        "headroom_bytes": limits.reserve_bytes if isinstance(limits.headroom, int) else 0,
        "source": "measured",
    }


def describe_batch(sample: Any) -> Json:
    """Shapes and dtypes of a batch's tensors, by their places in it."""
    leaves = pytree.tree_leaves_with_path(sample)
    return [
        [pytree.keystr(path), [*leaf.shape], str(leaf.dtype)] if isinstance(leaf, torch.Tensor) else pytree.keystr(path)
        for path, leaf in leaves
    ]


def versions(*packages: str) -> dict[str, Json]:
    """Versions of PyTorch, batchfinder and other packages, by the names that pip has."""
    found: dict[str, Json] = {"torch": torch.__version__}
    for name in ("batchfinder", *packages):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
