"""The kernels of `scaled_dot_product_attention`, each with what PyTorch does to the arguments before it.

Source: `scaled_dot_product_attention` in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/attention.cpp. The fused kernels are
the explicit operators, whose outputs and autograd formulas PyTorch knows without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_ALIGNMENT = 8
HALF_TYPES = (torch.float16, torch.bfloat16)


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

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient of the query, the key or the value may be asked for."""
        return any(tensor.requires_grad for tensor in (self.query, self.key, self.value))


def cudnn(call: AttentionCall) -> torch.Tensor:
    """cuDNN's fused kernel."""
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        call.query,
        call.key,
        call.value,
        _additive(call.mask, call.query.dtype),
        _keeps_logsumexp(call),
        call.dropout,
        call.is_causal,
        False,
        scale=call.scale,
    )[0]
    return output


def flash(call: AttentionCall) -> torch.Tensor:
    """Flash attention; heads are padded to a multiple of 8."""
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


def efficient(call: AttentionCall) -> torch.Tensor:
    """Memory-efficient attention; a mask whose rows are not aligned to 8 elements is padded."""
    query, key = call.query, call.key
    bias = _additive(call.mask, query.dtype)
    if bias is not None:
        if any(stride % _ALIGNMENT for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
            length = bias.size(-1)
            bias = F.pad(bias, (0, _ALIGNMENT - length % _ALIGNMENT))[..., :length]
        bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, call.value, bias, _keeps_logsumexp(call), call.dropout, call.is_causal, scale=call.scale
    )[0]
    return output


def by_hand(call: AttentionCall) -> torch.Tensor:
    """The math kernel: matrix products and a softmax, in fp32 for half types.

    PyTorch's own is not called: it adds the mask out of place when it meets fake tensors, and in place on a GPU. The
    locals live as long as they do there, to the end of the function.
    """
    mask = _additive(call.mask, call.query.dtype)
    query, key, value = (
        tensor.to(torch.float32) if tensor.dtype in HALF_TYPES else tensor
        for tensor in (call.query, call.key, call.value)
    )
    scale = 1 / math.sqrt(query.size(-1)) if call.scale is None else call.scale
    half_scale = math.sqrt(abs(scale))
    scaled = torch.ops.aten.mul.Scalar(query, math.copysign(half_scale, scale))
    if call.is_causal:
        causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        mask = _additive(causal, query.dtype)
        del causal
    key_per_head, value_per_head = key, value
    if call.grouped and not query.size(-3) == key.size(-3) == value.size(-3):
        key_per_head = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value_per_head = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    weights = scaled @ torch.ops.aten.mul.Scalar(key_per_head.transpose(-2, -1), half_scale)
    if mask is not None:
        weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if call.dropout > 0:
        weights = torch.dropout(weights, call.dropout, True)
    # The operator returns the weights too, in the query's type: they are made first, and dropped by its caller.
    returned = weights.to(call.query.dtype)
    output = (weights @ value_per_head).to(call.query.dtype)
    del returned
    return output


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask as one to add, as `convert_boolean_attn_mask` makes it."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask.logical_not(), -math.inf, torch.zeros((), dtype=dtype))


def _keeps_logsumexp(call: AttentionCall) -> bool:
    return torch.is_grad_enabled() and call.needs_grad


KERNELS: dict[str, Callable[[AttentionCall], torch.Tensor]] = {
    "cudnn": cudnn,
    "flash": flash,
    "efficient": efficient,
    "math": by_hand,
}
