"""Which reductions an operator runs on CUDA, by `gpu_reduce_kernel`: those that allocate scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from batchfinder.recording.kernel_memory import HALF_TYPES, aten, type_of_sum
from batchfinder.simulator.reductions import Reduction

_WELFORD = 16
"""Bytes of a partial mean and variance: `WelfordData` of fp32, with its 32-bit count."""
_WITH_PLACE = 16
"""Bytes of a partial maximum and its place."""


def reductions_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Reduction]:
    """The reductions of an operator on the fake GPU, in the order in which they run; none for most operators."""
    reduced = _REDUCED.get(func)
    return [] if reduced is None else [each for each in reduced(*args, **kwargs) if 0 not in each.shape]


def _reduction(tensor: torch.Tensor, dims: Sequence[int] | int | None, partial_bytes: int, **how: Any) -> Reduction:
    dims = (dims,) if isinstance(dims, int) else dims or ()
    return Reduction.of(
        tensor.shape,
        tensor.stride(),
        dims,
        offset=tensor.storage_offset(),
        element_bytes=tensor.element_size(),
        partial_bytes=partial_bytes,
        **how,
    )


def _sum(
    tensor: torch.Tensor, dims: Sequence[int] | None = None, keep: bool = False, *, dtype: torch.dtype | None = None
) -> list[Reduction]:
    """A sum, mean or norm. Half types are summed as fp32 without a copy, others in a copy of the output's type."""
    made, read = type_of_sum(tensor, dtype)
    if read != tensor.dtype:
        tensor = torch.empty_like(tensor, dtype=read, device="meta")
    return [_reduction(tensor, dims, max(4, made.itemsize), separate_sums=made is read and read in HALF_TYPES)]


def _norm(
    tensor: torch.Tensor,
    order: float = 2,
    dims: Sequence[int] | None = None,
    keep: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> list[Reduction]:
    return _sum(tensor, dims, dtype=dtype)


def _extreme(tensor: torch.Tensor, dims: Sequence[int] | int | None = None, *_: Any) -> list[Reduction]:
    return [_reduction(tensor, dims, tensor.element_size())]


def _place(tensor: torch.Tensor, dim: int | None = None, *_: Any) -> list[Reduction]:
    return [_reduction(tensor, dim, _WITH_PLACE, separate_sums=True)]


def _truth(tensor: torch.Tensor, dim: int | None = None, *_: Any) -> list[Reduction]:
    return [_reduction(tensor, dim, torch.bool.itemsize)]


def _product(tensor: torch.Tensor, dim: int | None = None, *_: Any, **__: Any) -> list[Reduction]:
    return [_reduction(tensor, dim, max(4, tensor.element_size()))]


def _variance(tensor: torch.Tensor, dims: Sequence[int] | None = None, **_: Any) -> list[Reduction]:
    return [_reduction(tensor, dims, _WELFORD, vector=2, separate_sums=True)]


def _convolution_backward(
    grad: torch.Tensor, data: torch.Tensor, weight: torch.Tensor, bias_sizes: list[int] | None, *rest: Any
) -> list[Reduction]:
    """The bias's gradient, which is summed after those of the input and the weight.

    Source: `convolution_backward` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Convolution.cpp.
    """
    return _sum(grad, [dim for dim in range(grad.dim()) if dim != 1]) if rest[-1][2] else []


_REDUCED: dict[Any, Callable[..., list[Reduction]]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _sum,
    aten.mean.dim: _sum,
    aten.linalg_vector_norm.default: _norm,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    aten.max.dim: _place,
    aten.min.dim: _place,
    aten.argmax.default: _place,
    aten.argmin.default: _place,
    aten.any.default: _truth,
    aten.any.dim: _truth,
    aten.all.default: _truth,
    aten.all.dim: _truth,
    aten.prod.default: _product,
    aten.prod.dim_int: _product,
    aten.var.correction: _variance,
    aten.std.correction: _variance,
    aten.var_mean.correction: _variance,
    aten.std_mean.correction: _variance,
    aten.convolution_backward.default: _convolution_backward,
}
