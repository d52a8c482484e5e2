"""Answers for code that reads a value from a tensor that has none.

`.item()`, `bool(tensor)` and operators whose output's shape depends on values must not end a recording. Each gets one
fixed, plausible answer, and the recording says that it did so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def plausible_scalar(tensor: torch.Tensor, made_by: str, filled_with: float | None) -> bool | int | float:
    """What a tensor of one element may be taken to hold.

    Args:
        tensor: one element.
        made_by: the operator that made its storage.
        filled_with: the constant it was made with, if it was.

    Returns:
        The constant it was made with; else True for `all`, False for `any` and other tests (nothing is masked, nothing
        is infinite), 1 for numbers.
    """
    if filled_with is not None:
        value: float = filled_with
    elif tensor.dtype is torch.bool:
        value = made_by.startswith("aten.all")
    else:
        value = 1.0
    if tensor.dtype is torch.bool:
        return bool(value)
    return float(value) if tensor.dtype.is_floating_point else int(value)


_COPIES = frozenset({aten._to_copy.default, aten.clone.default})


def copied_from(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The tensor that a copying operator copies; None for any other operator."""
    return args[0] if func in _COPIES else None


def constant_of(func: Any, args: tuple[Any, ...]) -> float | None:
    """The value that a filling operator fills its new tensor with; None for any other operator."""
    name = func._schema.name
    if name in ("aten::zeros", "aten::zeros_like", "aten::new_zeros"):
        return 0.0
    if name in ("aten::ones", "aten::ones_like", "aten::new_ones"):
        return 1.0
    if name in ("aten::full", "aten::full_like", "aten::new_full", "aten::scalar_tensor"):
        place = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2, "aten::scalar_tensor": 0}[name]
        value = args[place] if len(args) > place else None
        return float(value) if isinstance(value, (bool, int, float)) else None
    return None


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((tensor.numel(), tensor.dim()), dtype=torch.int64, device=tensor.device)


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    size = torch.broadcast_shapes(tensor.shape, mask.shape).numel()
    return torch.empty(size, dtype=tensor.dtype, device=tensor.device)


def _unique(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.empty(tensor.numel(), dtype=torch.int64, device=tensor.device)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device), index, torch.empty_like(index)


def _bincount(tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    dtype = torch.int64 if weights is None else weights.dtype
    return torch.empty(max(minlength, tensor.numel()), dtype=dtype, device=tensor.device)


# As large as they can get: every element is selected, every element is different.
LARGEST_OUTPUT: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.bincount.default: _bincount,
}
