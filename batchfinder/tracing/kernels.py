"""Memory that CUDA's kernels take for themselves, which no operator's output shows.

Two sorts. The cuBLAS workspace stays: it is taken from the caching allocator the first time that a thread multiplies
matrices on a stream, and the backward runs on a thread of its own, so a training step ends up with two. Scratch tensors
come and go within one kernel; the large ones are modelled here, the rest is named in docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

MATRIX_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten._addmm_activation.default,
    }
)


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace: `:4096:2:16:8` (KiB x count pairs), or 32 MiB on Hopper and data-centre Blackwell.

    Source: `parseChosenWorkspaceSize` and `getChosenWorkspaceSize` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    return 32 << 20 if capability[0] in (9, 10) else (2 * 4096 + 8 * 16) << 10


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **_: Any) -> list[int]:
    """`mha_bwd`: the softmax's row sums and dq in fp32, padded; dk and dv once per query head when heads share keys.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    batch, heads, length, head = query.shape
    padded, head_padded = _round_up(length, 128), _round_up(head, 32 if head <= 128 else 64)
    sizes = [4 * batch * heads * padded, 4 * batch * padded * heads * head_padded]
    if key.size(1) != heads:
        expanded = query.element_size() * batch * key.size(2) * heads * head
        sizes += [expanded, expanded]
    return sizes


def _efficient_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **_: Any) -> list[int]:
    """`_efficient_attention_backward`: delta, and for half types an fp32 accumulator of dq where keys exceed one block.

    Source: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/attention_backward.cu.
    """
    batch, heads, length, head = query.shape
    sizes = [4 * batch * heads * _round_up(length, 32)]
    if query.element_size() == 2 and max(head, rest[0].size(-1)) > 64:
        sizes.append(4 * batch * heads * _round_up(length, 64) * _round_up(head, 32))
    return sizes


SCRATCH: dict[Any, Callable[..., list[int]]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
