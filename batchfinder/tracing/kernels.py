"""Memory that CUDA's kernels take for themselves, which no operator's output shows.

Two sorts. The cuBLAS workspace stays: it is taken from the caching allocator the first time that a thread multiplies
matrices on a stream, and the backward runs on a thread of its own, so a training step ends up with two. Scratch tensors
come and go within one kernel; those that are as large as an activation are modelled, the rest is named in
docs/simulator.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from batchfinder.tracing.pretend import DEVICE_TYPE

aten = torch.ops.aten

# What asks for a cuBLAS handle. An addmm with a bias runs in cuBLASLt, which shares cuBLAS's workspace.
MATRIX_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.mm.dtype,
        aten.bmm.default,
        aten.bmm.dtype,
        aten.addmm.default,
        aten.addmm.dtype,
        aten.baddbmm.default,
        aten.baddbmm.dtype,
        aten.addbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.vdot.default,
        aten._addmm_activation.default,
    }
)

# Sizes of what a kernel allocates, from the operator's arguments. The recording allocates them after the operator's
# outputs and releases them, last first, at the kernel's end; so what counts is what is alive at one time.
Scratch = Callable[..., list[int]]

# Operators that have no fake kernel, or one that leaves out memory, with what makes their outputs instead. Filled up by
# `recurrent.register`.
REPLACED: dict[Any, Callable[..., Any]] = {}


def only_writes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator does nothing but write to lists of tensors on the pretend GPU, as an optimizer's step does.

    Such a kernel takes no memory and its tensors have no values, so there is nothing to be done. To compute what it
    would do to hundreds of shapes is a fifth of a recording's time.
    """
    return _writes_lists(func) and all(tensor.device.type == DEVICE_TYPE for tensor in args[0])


@functools.cache
def _writes_lists(func: Any) -> bool:
    return func._schema.name.startswith("aten::_foreach_") and not func._schema.returns


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace: `:4096:2:16:8` (KiB x count pairs), or 32 MiB on Hopper and Blackwell.

    One belongs to each pair of handle and stream, and a thread has handles of its own. cuBLASLt shares it
    (https://github.com/pytorch/pytorch/pull/168175), so it takes nothing more.

    Source: `parseChosenWorkspaceSize`, `setWorkspaceForHandle` and `getCUDABlasLtWorkspace` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/cuda/CublasHandlePool.cpp; Blackwell since
    https://github.com/pytorch/pytorch/pull/175344.
    """
    return 32 << 20 if capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) << 10


def _safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> list[int]:
    """The softmax itself, and which scores and which rows are masked: the output is chosen from them.

    Source: `_safe_softmax` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/attention.cpp.
    """
    if scores.numel() == 0:
        return []
    size = (dtype or scores.dtype).itemsize
    return [size * scores.numel(), scores.numel(), scores.numel() // scores.size(dim)]


# Filled up by `attention.register` with the scratch of the simulated GPU's attention kernels.
SCRATCH: dict[Any, Scratch] = {aten._safe_softmax.default: _safe_softmax}
