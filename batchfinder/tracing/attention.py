"""Which attention kernel a given GPU would run for `scaled_dot_product_attention`.

PyTorch decides by compute capability, types, mask, head size and dropout. The rules are `select_sdp_backend` in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and the checks in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/sdp_utils_cpp.h. Assumed are PyPI's
wheels of PyTorch 2.13 (CUDA 13.0, cuDNN 9.20), no deterministic algorithms, and no backend turned off by the user.
"""

from __future__ import annotations

import functools

import torch
from torch.library import Library

from batchfinder.errors import InvalidValue
from batchfinder.tracing import kernels
from batchfinder.tracing.attention_kernels import HALF_TYPES, KERNELS, AttentionCall
from batchfinder.tracing.attention_scratch import attention_scratch

__all__ = ["AttentionCall", "choose_kernel", "flash_or_error", "register"]


def choose_kernel(capability: tuple[int, int], call: AttentionCall) -> str:
    """The kernel for these arguments: `cudnn`, `flash`, `efficient` or `math`.

    Args:
        capability: the simulated GPU's compute capability.
        call: the arguments.
    """
    if not _fused_could_take(call):
        return "math"
    for name, takes in (("cudnn", _cudnn_takes), ("flash", _flash_takes), ("efficient", _efficient_takes)):
        if takes(capability, call):
            return name
    return "math"


def _fused_could_take(call: AttentionCall) -> bool:
    """What all fused kernels want: four dimensions, one batch size, no empty sequence, dense rows."""
    query, key, value = call.query, call.key, call.value
    tensors = (query, key, value)
    if any(tensor.dim() != 4 or tensor.size(0) != query.size(0) for tensor in tensors):
        return False
    if call.mask is not None and call.mask.stride(-1) != 1:
        return False
    return 0 not in (query.size(2), key.size(2))


def _cudnn_takes(capability: tuple[int, int], call: AttentionCall) -> bool:
    """cuDNN comes first on Hopper and data-centre Blackwell, and never on the others (check_prefer_cudnn_attention)."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    head, value_head = query.size(-1), value.size(-1)
    widest = 192 if (head, value_head) == (192, 128) and (capability == (9, 0) or capability[0] == 10) else 128
    return (
        capability[0] in (9, 10)
        and query.dtype in HALF_TYPES
        and _dense(call, but_for_single=True)
        and ((call.grouped and _divides(key, query) and _divides(value, query)) or _same_heads(call))
        and (mask is None or (not mask.requires_grad and _is_mask_of_two_or_four(call)))
        and (call.dropout * 16).is_integer()
        and max(head, value_head) <= widest
        and head % 8 == value_head % 8 == 0
        and key.size(2) != 1
        and not (call.dropout > 0 and query.size(2) == 1)
    )


def _flash_takes(capability: tuple[int, int], call: AttentionCall) -> bool:
    query, key, value = call.query, call.key, call.value
    head = query.size(-1)
    if call.needs_grad and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
        # Less shared memory: their backward has no kernel for some of the widest heads.
        fits = head <= 192 or (head > 224 and call.dropout == 0)
    else:
        fits = True
    return (
        capability >= (8, 0)
        and query.dtype in HALF_TYPES
        and call.mask is None
        and head == key.size(-1) == value.size(-1)
        and head <= 256
        and fits
        and _dense(call, but_for_single=True)
        and ((call.grouped and key.size(1) == value.size(1) and _divides(key, query)) or _same_heads(call))
        and not (call.is_causal and query.size(2) != key.size(2))
    )


def _efficient_takes(capability: tuple[int, int], call: AttentionCall) -> bool:
    """Query heads cannot share key heads here until https://github.com/pytorch/pytorch/pull/191085, after 2.13."""
    query, key, value = call.query, call.key, call.value
    alignment = _gemm_alignment(capability, query.dtype)
    types = (torch.float32, *HALF_TYPES) if capability >= (8, 0) else (torch.float32, torch.float16)
    return (
        capability >= (5, 0)
        and query.dtype in types
        and _dense(call, but_for_single=False)
        and _same_heads(call)
        and query.size(-1) == key.size(-1) > 0
        and value.size(-1) > 0
        and query.size(-1) % alignment == value.size(-1) % alignment == 0
    )


def _dense(call: AttentionCall, but_for_single: bool) -> bool:
    """Whether the last dimensions are contiguous; some kernels do not mind for a head of one element."""
    dense = all(tensor.stride(-1) == 1 for tensor in (call.query, call.key, call.value))
    return dense or (but_for_single and call.query.size(-1) == 1)


def _same_heads(call: AttentionCall) -> bool:
    return call.query.size(1) == call.key.size(1) == call.value.size(1)


def _divides(shared: torch.Tensor, query: torch.Tensor) -> bool:
    return query.size(1) % shared.size(1) == 0


def _is_mask_of_two_or_four(call: AttentionCall) -> bool:
    """`check_attn_mask_shape`: (query, key) or (batch, heads, query, key), each of the size or 1."""
    assert call.mask is not None
    full = (*call.query.shape[:3], call.key.size(2))
    sizes = tuple(call.mask.shape)
    return len(sizes) in (2, 4) and all(
        size in (1, whole) for size, whole in zip(sizes, full[-len(sizes) :], strict=True)
    )


def _gemm_alignment(capability: tuple[int, int], dtype: torch.dtype) -> int:
    """`minimum_gemm_alignment`: elements the head size must be a multiple of."""
    half = dtype in HALF_TYPES
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    return max(alignment, 128 // (16 if half else 32)) if tensor_cores else alignment


def flash_or_error(capability: tuple[int, int], call: AttentionCall) -> str:
    """`flash`, for those who ask for it by name.

    Raises:
        InvalidValue: this GPU has no flash kernel for these arguments.
    """
    if capability < (8, 0) or call.query.dtype not in HALF_TYPES or call.mask is not None or call.query.size(-1) > 256:
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
        return KERNELS[choose(capability, call)](call)

    kernels.SCRATCH.update(attention_scratch(capability))
    # Inference mode skips the autograd key, so the backend's own key needs the routing too.
    libraries = tuple(Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1"))
    for library in libraries:
        library.impl("scaled_dot_product_attention", attention)
    return libraries
