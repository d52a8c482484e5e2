"""The fields of a cache key that all measured results share, as JSON values."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from batchfinder.cache.key import Json
from batchfinder.measure.device_memory import Memory
from batchfinder.measure.tuner import SearchLimits
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import CUBLAS_WORKSPACES, VARIABLES
from batchfinder.versions import installed

_MALLOC = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")


def measured_key_fields(
    memory: Memory, limits: SearchLimits, device: torch.device, shape: Shape, optimizers: Sequence[Any]
) -> dict[str, Any]:
    """The device, the search's limits and the optimizers, as fields of a `CacheKey`."""
    # The environment variables that change what is allocated on the device, and how.
    variables = (*VARIABLES, CUBLAS_WORKSPACES) if device.type == "cuda" else _MALLOC
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
        "headroom_bytes": limits.headroom if isinstance(limits.headroom, int) else 0,
        "source": "measured",
    }


def describe_batch(sample: Any) -> Json:
    """Shapes and dtypes of a batch's tensors, by their places in it."""
    leaves = pytree.tree_leaves_with_path(sample)
    return [
        [pytree.keystr(path), [*leaf.shape], str(leaf.dtype)] if isinstance(leaf, torch.Tensor) else pytree.keystr(path)
        for path, leaf in leaves
    ]


def describe_sharding(modules: Iterable[nn.Module]) -> dict[str, Json]:
    """What a process holds of parameters that are spread over several, and how FSDP gathers them; empty without any."""
    found: list[Json] = []
    tensors, fsdp = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "fsdp"))
    for module in modules:
        for name, parameter in module.named_parameters() if tensors is not None else ():
            if isinstance(parameter, tensors.DTensor):  # type: ignore[union-attr]
                shape, mesh = [*parameter.to_local().shape], [*parameter.device_mesh.shape]
                found.append([name, shape, [str(placement) for placement in parameter.placements], mesh])
        for name, part in module.named_modules() if fsdp is not None else ():
            if isinstance(part, fsdp.FSDPModule):  # type: ignore[union-attr]
                # No getters for what `fully_shard` was given (torch/distributed/fsdp/_fully_shard, PyTorch 2.13).
                state = part._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)  # before PyTorch 2.13 there is one at most
                for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
                    again = group.post_forward_mesh_info
                    size = None if again is None else again.shard_mesh_size
                    found.append([name, repr(group.mp_policy), repr(group.offload_policy), size])
    return {"sharding": found} if found else {}


def versions(*packages: str) -> dict[str, Json]:
    """Versions of PyTorch, batchfinder and other packages, by the names that pip has."""
    return {"torch": torch.__version__, **dict.fromkeys(packages, "not installed"), **installed(*packages)}
