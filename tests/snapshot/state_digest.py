"""All state within reach of some objects, as a flat dictionary to compare, written without looking at the capture.

It knows nothing of what the capture leaves alone, so what is digested here must hold only what has to come back.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
import types
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as modules
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

Digest = dict[str, Any]
UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)
PLAIN = (int, float, complex, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device, range)


class Digester:
    """Describes objects by path.

    Args:
        keep: hold every object met, so that its address tells whether it is the same one later; otherwise addresses are
            numbered in the order in which they are met, which still tells what is shared with what.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.kept: list[Any] = []

    def __call__(self, **roots: Any) -> Digest:
        """Everything within reach, and the process's own state."""
        found: Digest = {}
        seen: dict[Any, int] = {}
        # Only while it runs: a temporary's address may not be given to another object.
        alive: list[Any] = []
        stack: list[tuple[str, Any]] = list(roots.items())
        while stack:
            path, item = stack.pop()
            if isinstance(item, PLAIN):
                found[path] = (type(item), repr(item))
                continue
            first = id(item) not in seen
            number = seen.setdefault(id(item), len(seen))
            found[path] = (type(item), id(item)) if self.keep else (type(item).__qualname__, number)
            if not first:
                continue
            alive += [item, item.untyped_storage()] if _has_storage(item) else [item]
            value, parts = _contents(item, lambda key: seen.setdefault(key, len(seen)), self.keep)
            found[path + "="] = value
            stack.extend((f"{path}{name}", part) for name, part in parts)
        if self.keep:
            self.kept += alive
        return found | _process()


def differences(now: Digest, then: Digest) -> list[str]:
    """The paths at which two digests differ."""
    return sorted(path for path in now.keys() | then.keys() if now.get(path, "nothing") != then.get(path, "nothing"))


def _contents(item: Any, number: Any, keep: bool) -> tuple[Any, list[tuple[str, Any]]]:
    """What one object is worth in itself, and its parts by name."""
    parts: list[tuple[str, Any]] = []
    value: Any = None
    if isinstance(item, torch.Tensor):
        return _tensor(item, number, keep)
    if isinstance(item, dict):
        value = [repr(key) if isinstance(key, PLAIN) else id(key) if keep else number(id(key)) for key in item]
        parts = [(f"[{index}]", part) for index, part in enumerate(item.values())]
    elif isinstance(item, (list, tuple, deque)):
        parts = [(f"[{index}]", part) for index, part in enumerate(item)]
    elif isinstance(item, (set, frozenset)):
        value = sorted(map(repr, item))
    elif isinstance(item, np.ndarray):
        value = (item.shape, item.dtype.str, None if item.dtype.hasobject else item.tobytes())
        parts = [(f"[{index}]", part) for index, part in enumerate(item.flat)] if item.dtype.hasobject else []
    elif isinstance(item, bytearray):
        value = bytes(item)
    elif isinstance(item, torch.Generator):
        value = item.get_state().numpy().tobytes()
    elif isinstance(item, random.Random):
        value = item.getstate()
    elif isinstance(item, np.random.Generator):
        value = repr(item.bit_generator.state)
    elif isinstance(item, types.FunctionType):
        parts = [(f"<{index}>", cell.cell_contents) for index, cell in enumerate(item.__closure__ or ())]
    elif isinstance(item, functools.partial):
        parts = [(".func", item.func), (".args", item.args), (".keywords", item.keywords)]
    elif isinstance(item, types.MethodType):
        value = id(item.__func__)
        parts = [(".__self__", item.__self__)]
    if not isinstance(item, (types.FunctionType, types.MethodType, functools.partial, np.ndarray)):
        parts += [(".__dict__", vars(item))] if hasattr(item, "__dict__") else []
        for base in type(item).__mro__:
            slots = [name for name in vars(base).get("__slots__", ()) if not name.startswith("__")]
            parts += [(f".{name}", getattr(item, name)) for name in slots if hasattr(item, name)]
    return value, parts


def _tensor(item: torch.Tensor, number: Any, keep: bool) -> tuple[Any, list[tuple[str, Any]]]:
    parts: list[tuple[str, Any]] = [(".__dict__", vars(item)), (".hooks", item._backward_hooks)]
    parts.append((".late_hooks", item._post_accumulate_grad_hooks))
    if item.is_leaf:
        parts.append((".grad", item.grad))
    if isinstance(item, UNINITIALIZED):
        return ("uninitialized", item.dtype, item.requires_grad), parts
    if not _has_storage(item):
        dense = item.detach().to_dense()
        return (item.layout, hashlib.sha256(dense.numpy().tobytes()).hexdigest()), parts
    storage = item.untyped_storage()
    contents = hashlib.sha256(torch.empty(0, dtype=torch.uint8).set_(storage).clone().numpy().tobytes()).hexdigest()
    return (
        (item.dtype, tuple(item.shape), item.stride(), item.storage_offset(), item.requires_grad, item.is_leaf),
        storage._cdata if keep else number(("storage", storage._cdata)),
        contents,
    ), parts


def _has_storage(item: Any) -> bool:
    plain = isinstance(item, torch.Tensor) and not isinstance(item, UNINITIALIZED)
    return plain and item.layout is torch.strided


def _process() -> Digest:
    """Random numbers, settings and hooks that belong to no object."""
    return {
        "python random": random.getstate(),
        "numpy random": repr(np.random.get_state(legacy=False)),
        "torch random": torch.get_rng_state().numpy().tobytes(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "precision": torch.get_float32_matmul_precision(),
        "autocast": [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in ("cpu", "cuda")
        ],
        "anomaly": torch.is_anomaly_enabled(),
        "numpy errors": np.geterr(),
        "hooks on all modules": list(modules._global_forward_hooks),
    }
