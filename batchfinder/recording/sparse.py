"""Sparse tensors of coordinates (COO) on the fake GPU: what holds them, and what CUDA's kernels take for them.

Such a tensor is two dense ones: indices, (sparse dimensions, places), and values, (places, ...). PyTorch makes fake
ones, but lacks shapes for some of their operators. Adding one to a dense tensor of another type takes most: the dense
tensor in the type of the sum, twice. Of products with sparse matrices and of the compressed layouts nothing is known
here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from batchfinder.recording.kernel_memory import REPLACED, SCRATCH, aten

_INDEX = 8  # bytes: an index is an int64

COALESCED = "sparse tensors: every place is different, so that coalescing merges none"


def register() -> None:
    """Add these operators' outputs to `REPLACED` and their scratch to `SCRATCH`, for good."""
    REPLACED[aten.detach.default] = _detach
    REPLACED[aten.clone.default] = _clone
    REPLACED[aten.add.Tensor] = _add
    REPLACED[aten.add_.Tensor] = _add_in_place
    REPLACED[aten._coalesce.default] = _coalesce
    REPLACED[aten.sparse_mask.default] = _sparse_mask
    SCRATCH[aten.add.Tensor] = _add_scratch
    SCRATCH[aten.add_.Tensor] = _add_in_place_scratch
    SCRATCH[aten._coalesce.default] = _coalesce_scratch
    SCRATCH[aten.sparse_mask.default] = _sparse_mask_scratch
    SCRATCH[aten._to_dense.default] = _to_dense_scratch


def _is_sparse(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo


def _like(sparse: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, coalesced: bool) -> torch.Tensor:
    """A sparse tensor of the same shape, which holds these."""
    made: torch.Tensor = aten._sparse_coo_tensor_with_dims_and_tensors(
        sparse.sparse_dim(),
        sparse.dense_dim(),
        sparse.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=coalesced,
    )
    return made


def _detach(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.sparse_coo:
        return aten.detach.default(tensor)
    return _like(tensor, tensor._indices(), tensor._values(), tensor.is_coalesced())


def _clone(tensor: torch.Tensor, **layout: Any) -> Any:
    if tensor.layout is not torch.sparse_coo:
        return aten.clone.default(tensor, **layout)
    return _like(tensor, tensor._indices().clone(), tensor._values().clone(), tensor.is_coalesced())


def _add(first: torch.Tensor, second: Any, *, alpha: Any = 1) -> Any:
    if not _is_sparse(second) or _is_sparse(first):
        return aten.add.Tensor(first, second, alpha=alpha)
    return torch.empty_like(first, dtype=torch.result_type(first, second))


def _add_in_place(first: torch.Tensor, second: Any, *, alpha: Any = 1) -> Any:
    if not _is_sparse(second) or _is_sparse(first):
        return aten.add_.Tensor(first, second, alpha=alpha)
    return first


def _coalesce(sparse: torch.Tensor) -> torch.Tensor:
    """New indices and values, of as many places as there were: how many are the same depends on values."""
    places = min(sparse._nnz(), math.prod(sparse.shape[: sparse.sparse_dim()]))
    indices, values = sparse._indices(), sparse._values()
    return _like(
        sparse,
        indices.new_empty((indices.size(0), places)),
        values.new_empty((places, *values.shape[1:])),
        coalesced=True,
    )


def _sparse_mask(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor at the places of a mask, with a copy of the mask's indices.

    Source: `sparse_mask` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/sparse/SparseTensor.cpp and
    `intersection_binary_op_sparse_dense_out` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/sparse/SparseTensorMath.cpp.
    """
    values = torch.empty_like(mask._values(), dtype=tensor.dtype)
    return _like(mask, mask._indices().clone(), values, mask.is_coalesced())


def _flat_places(sparse: torch.Tensor) -> list[int]:
    """What makes one number of each place: its indices times the strides, and their sum; of one dimension a view.

    Source: `flatten_indices` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/SparseTensorUtils.cpp.
    """
    dimensions, places = sparse.sparse_dim(), sparse._nnz()
    return [_INDEX * dimensions * places, _INDEX * places] if dimensions > 1 else []


def _add_scratch(first: torch.Tensor, second: Any, **_: Any) -> list[int]:
    """What a dense and a sparse tensor are before they are added: both in the type of the sum, and the flat places.

    The dense one's copy is what the output is filled from. A coalesced tensor's places are read as they are.

    Args:
        first: dense, (...).
        second: sparse, of the same shape. Any other sum takes no scratch.

    Source: `add_out_dense_sparse_cuda` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu.
    """
    if not _is_sparse(second) or _is_sparse(first):
        return []
    dtype = torch.result_type(first, second)
    converted = [tensor for tensor in (first, second._values()) if tensor.dtype != dtype]
    return [dtype.itemsize * tensor.numel() for tensor in converted] + (
        [] if second.is_coalesced() else _flat_places(second)
    )


def _add_in_place_scratch(first: torch.Tensor, second: Any, **_: Any) -> list[int]:
    """As `_add_scratch`; and the sum, where it is of another type than the tensor that it is copied to at the end."""
    taken = _add_scratch(first, second)
    if not taken or torch.result_type(first, second) == first.dtype:
        return taken
    return [torch.result_type(first, second).itemsize * first.numel(), *taken]


def _to_dense_scratch(sparse: torch.Tensor, *_: Any, **__: Any) -> list[int]:
    """The flat places: it is added to zeros.

    Source: `sparse_to_dense` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/TensorConversions.cpp.
    """
    return [] if not _is_sparse(sparse) or sparse.is_coalesced() else _flat_places(sparse)


def _coalesce_scratch(sparse: torch.Tensor) -> list[int]:
    """The flat places, which are sorted, where each was, and where each different one starts.

    What the sort itself takes is gone before the output is there, and no more than that.

    Source: `_coalesce_sparse_cuda` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu.
    """
    return 3 * [_INDEX * sparse._nnz()]


def _sparse_mask_scratch(tensor: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """The elements themselves, before they are multiplied by the mask's ones.

    Of a sparse tensor: both tensors' places as flat numbers and counted, and for each how many match and the first.

    Source: `_sparse_binary_op_intersection_kernel_impl` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/sparse/SparseBinaryOpIntersectionCommon.h.
    """
    if not _is_sparse(tensor):
        return [tensor.dtype.itemsize * mask._values().numel()]
    places = mask._nnz()
    return [_INDEX * max(places, tensor._nnz()), _INDEX * tensor._nnz(), 2 * _INDEX * places]
