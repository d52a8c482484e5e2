"""Which attention kernel a given GPU would run for `scaled_dot_product_attention`.

PyTorch decides by compute capability, types, mask, head size and dropout; the rules are those of `select_sdp_backend` in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, and what is done to
the arguments before each kernel is in `scaled_dot_product_attention` of
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/attention.cpp. The kernels themselves
are the explicit operators, whose outputs and autograd formulas PyTorch knows without a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.library import Library

from batchfinder.errors import InvalidValue

_ALIGNMENT = 8
_HALF = (torch.float16, torch.bfloat16)
# cuDNN comes first on Hopper and data-centre Blackwell only (check_prefer_cudnn_attention).
_CUDNN_FIRST = (9, 10)


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of `scaled_dot_product_attention`.

    Attributes:
        query: (batch, heads, query length, head size).
        key: (batch, key heads, key length, head size).
        value: (batch, key heads, key length, value head size).
        mask: broadcastable to (batch, heads, query length, key length): bool (True takes part) or to be added; or None.
        dropout: probability.
        is_causal: whether the kernel is asked to mask the future itself.
        scale: what the scores are multiplied by; None for 1 / sqrt(head size).
        grouped: whether several query heads may share a key head.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    grouped: bool = False


def choose_kernel(capability: tuple[int, int], call: AttentionCall) -> str:
    """The kernel for these arguments: `cudnn`, `flash`, `efficient` or `math`.

    Args:
        capability: the simulated GPU's compute capability.
        call: the arguments.
    """
    query, key, value = call.query, call.key, call.value
    if query.dim() != 4:
        return "math"
    head, value_head = query.size(-1), value.size(-1)
    grouped = query.size(1) != key.size(1)
    dense = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    half_type = query.dtype in _HALF if capability >= (8, 0) else query.dtype is torch.float16
    if not dense or 0 in (query.size(2), key.size(2)):
        return "math"
    square = not call.is_causal or query.size(2) == key.size(2)
    if (
        capability[0] in _CUDNN_FIRST
        and half_type
        and (call.dropout * 16).is_integer()
        and head <= 128
        and value_head <= 128
        and head % 8 == value_head % 8 == 0
        and key.size(2) > 1
    ):
        return "cudnn"
    if capability >= (8, 0) and half_type and call.mask is None and head == value_head <= 256 and square:
        needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
        small_shared_memory = (8, 6) <= capability <= (8, 9) or capability[0] == 12
        if not (needs_grad and small_shared_memory and (192 < head <= 224 or (head > 224 and call.dropout > 0))):
            return "flash"
    efficient_types = (torch.float32, *_HALF) if capability >= (8, 0) else (torch.float32, torch.float16)
    if (
        capability >= (5, 0)
        and query.dtype in efficient_types
        and not grouped
        and head % _gemm_alignment(capability, query.dtype) == 0
        and value_head % _gemm_alignment(capability, query.dtype) == 0
    ):
        return "efficient"
    return "math"


def _gemm_alignment(capability: tuple[int, int], dtype: torch.dtype) -> int:
    """`minimum_gemm_alignment`: elements the head size must be a multiple of."""
    half = dtype in _HALF
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def flash_or_error(capability: tuple[int, int], call: AttentionCall) -> str:
    """`flash`, for those who ask for it by name.

    Raises:
        InvalidValue: this GPU has no flash kernel for these arguments.
    """
    if capability < (8, 0) or call.query.dtype not in _HALF or call.mask is not None or call.query.size(-1) > 256:
        kind = str(call.query.dtype).removeprefix("torch.")
        raise InvalidValue(
            "attention",
            "flash",
            "sdpa or eager: flash attention needs compute capability 8.0, half precision, heads of at most 256 and no "
            f"mask; this is {kind} on {capability[0]}.{capability[1]}{'' if call.mask is None else ', with a mask'}",
        )
    return "flash"


@functools.cache
def register(capability: tuple[int, int], flash: bool = False) -> tuple[Library, ...]:
    """Route the pretend GPU's attention as a GPU of this compute capability would. Once per process.

    Args:
        capability: the simulated GPU's compute capability.
        flash: whether nothing but the flash kernel will do.

    Returns:
        The libraries that hold the registrations; they last as long as these do.
    """

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        choose = flash_or_error if flash else choose_kernel
        return _KERNELS[choose(capability, call)](call)

    # Inference mode skips the autograd key, so the backend's own key needs the routing too.
    libraries = tuple(Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1"))
    for library in libraries:
        library.impl("scaled_dot_product_attention", attention)
    return libraries


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask as one to add, as `convert_boolean_attn_mask` makes it."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask.logical_not(), -math.inf, torch.zeros((), dtype=dtype))


def _needs_logsumexp(call: AttentionCall) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (call.query, call.key, call.value))


def _cudnn(call: AttentionCall) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query,
        call.key,
        call.value,
        _additive(call.mask, call.query.dtype),
        _needs_logsumexp(call),
        call.dropout,
        call.is_causal,
        False,
        scale=call.scale,
    )[0]
    return output


def _flash(call: AttentionCall) -> torch.Tensor:
    query, key, value = call.query, call.key, call.value
    head = query.size(-1)
    if head % _ALIGNMENT:
        padding = (0, _ALIGNMENT - head % _ALIGNMENT)
        query, key, value = (F.pad(tensor, padding) for tensor in (query, key, value))
    scale = 1 / math.sqrt(head) if call.scale is None else call.scale
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.is_causal, False, scale=scale
    )[0]
    return output[..., :head] if output.size(-1) != head else output


def _efficient(call: AttentionCall) -> torch.Tensor:
    query, key = call.query, call.key
    bias = _additive(call.mask, query.dtype)
    if bias is not None:
        if any(stride % _ALIGNMENT for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
            length = bias.size(-1)
            bias = F.pad(bias, (0, _ALIGNMENT - length % _ALIGNMENT))[..., :length]
        bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, call.value, bias, _needs_logsumexp(call), call.dropout, call.is_causal, scale=call.scale
    )[0]
    return output


def _math(call: AttentionCall) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        call.query,
        call.key,
        call.value,
        _additive(call.mask, call.query.dtype),
        call.dropout,
        call.is_causal,
        None,
        scale=call.scale,
        enable_gqa=call.grouped,
    )[0]
    return output


_KERNELS: dict[str, Callable[[AttentionCall], torch.Tensor]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "math": _math,
}
