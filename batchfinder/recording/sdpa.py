"""`scaled_dot_product_attention` on the fake GPU: which kernel a given GPU runs, and what PyTorch does around it.

PyTorch decides by compute capability, types, mask, head size and dropout. The rules are `select_sdp_backend` in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and the checks in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/sdp_utils_cpp.h. Assumed are PyPI's
wheels of PyTorch 2.13 (CUDA 13.0, cuDNN 9.20), no deterministic algorithms, and no backend turned off by the user.

The fused kernels are the explicit operators, whose outputs and autograd formulas PyTorch knows without a GPU. What is
done to their arguments first is in `scaled_dot_product_attention`,
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/attention.cpp.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library

from batchfinder.errors import InvalidValue, RecordingFailed
from batchfinder.recording import kernel_memory
from batchfinder.recording.kernel_memory import HALF_TYPES, attention_scratch

NOT_FUSED = (
    "fsdp2-cp: no attention of this model ran as a kernel that PyTorch's context parallelism takes (flash, "
    "memory-efficient or cuDNN). Ask for --attention sdpa, another --precision or another GPU."
)
_ALIGNMENT = 8
same_kernels: set[tuple[int, int]] = set()
"""Compute capabilities for which every attention call of the recording so far has chosen the same kernel as its own."""


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


def choose_kernel(capability: tuple[int, int], call: AttentionCall) -> str:
    """The kernel for these arguments on a GPU of this compute capability: `cudnn`, `flash`, `efficient` or `math`."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    tensors = (query, key, value)
    # What all fused kernels want: four dimensions, one batch size, no empty sequence, dense rows.
    if any(tensor.dim() != 4 or tensor.size(0) != query.size(0) for tensor in tensors):
        return "math"
    if (mask is not None and mask.stride(-1) != 1) or 0 in (query.size(2), key.size(2)):
        return "math"
    half = query.dtype in HALF_TYPES
    head, value_head = query.size(-1), value.size(-1)
    dense = all(tensor.stride(-1) == 1 for tensor in tensors)
    same_heads = query.size(1) == key.size(1) == value.size(1)
    shares = call.grouped and query.size(1) % key.size(1) == 0 and query.size(1) % value.size(1) == 0

    # cuDNN comes first on Hopper and data-centre Blackwell, and never on the others (check_prefer_cudnn_attention).
    # Since 9.10 it takes heads of up to 256 on a Hopper (check_cudnn_tensor_shapes).
    widest = 192 if (head, value_head) == (192, 128) and capability[0] == 10 else 128
    widest = 256 if capability == (9, 0) else widest
    # `check_attn_mask_shape`: (query, key) or (batch, heads, query, key), each of the size or 1.
    full = (*query.shape[:3], key.size(2))
    mask_fits = mask is None or (
        not mask.requires_grad
        and mask.dim() in (2, 4)
        and all(size in (1, whole) for size, whole in zip(mask.shape, full[-mask.dim() :], strict=True))
    )
    if (
        capability[0] in (9, 10)
        and half
        and (dense or head == 1)
        and (shares or same_heads)
        and mask_fits
        and (call.dropout * 16).is_integer()
        and max(head, value_head) <= widest
        and head % 8 == value_head % 8 == 0
        and key.size(2) != 1
        and not (call.dropout > 0 and query.size(2) == 1)
    ):
        return "cudnn"

    # Less shared memory: the backward of these cards has no flash kernel for some of the widest heads.
    less_shared = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    fits = head <= 192 or (head > 224 and call.dropout == 0) or not (less_shared and call.needs_grad)
    if (
        capability >= (8, 0)
        and half
        and mask is None
        and head == key.size(-1) == value_head
        and head <= 256
        and fits
        and (dense or head == 1)
        and ((shares and key.size(1) == value.size(1)) or same_heads)
        and not (call.is_causal and query.size(2) != key.size(2))
    ):
        return "flash"

    # Query heads cannot share key heads here until https://github.com/pytorch/pytorch/pull/191085, after 2.13. The head
    # sizes must be multiples of `minimum_gemm_alignment`.
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and half):  # it has tensor cores
        alignment = 8 if half else 4
    types = (torch.float32, *HALF_TYPES) if capability >= (8, 0) else (torch.float32, torch.float16)
    if (
        capability >= (5, 0)
        and query.dtype in types
        and dense
        and same_heads
        and head == key.size(-1) > 0
        and value_head > 0
        and head % alignment == value_head % alignment == 0
    ):
        return "efficient"
    return "math"


FLASH_NEEDS = (
    "sdpa or eager: flash attention needs compute capability 8.0, half precision, heads of at most 256 and no mask"
)


def require_flash(capability: tuple[int, int], call: AttentionCall) -> str:
    """The flash kernel, which the user asked for by name.

    Raises:
        InvalidValue: this GPU has no flash kernel for these arguments.
    """
    if capability < (8, 0) or call.query.dtype not in HALF_TYPES or call.mask is not None or call.query.size(-1) > 256:
        kind = str(call.query.dtype).removeprefix("torch.")
        raise InvalidValue(
            "attention",
            "flash",
            f"{FLASH_NEEDS}; this is {kind} on {capability[0]}.{capability[1]}"
            f"{'' if call.mask is None else ', with a mask'}",
        )
    return "flash"


def run_fused(kernel: str, call: AttentionCall) -> torch.Tensor:
    """The fused kernel of this name: `cudnn`, `flash` or `efficient`."""
    query, key, value = call.query, call.key, call.value
    keeps_logsumexp = torch.is_grad_enabled() and call.needs_grad
    head = query.size(-1)
    output: torch.Tensor
    if kernel == "flash":
        if head % _ALIGNMENT:
            padding = (0, _ALIGNMENT - head % _ALIGNMENT)
            query, key, value = (F.pad(tensor, padding) for tensor in (query, key, value))
        scale = 1 / math.sqrt(head) if call.scale is None else call.scale
        output = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, call.dropout, call.is_causal, False, scale=scale
        )[0]
        return output[..., :head] if output.size(-1) != head else output

    bias = _additive(call.mask, query.dtype)
    if kernel == "cudnn":
        output = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, keeps_logsumexp, call.dropout, call.is_causal, False, scale=call.scale
        )[0]
    else:
        if bias is not None:  # one whose rows are not aligned to 8 elements is padded
            if any(stride % _ALIGNMENT for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
                length = bias.size(-1)
                bias = F.pad(bias, (0, _ALIGNMENT - length % _ALIGNMENT))[..., :length]
            bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        output = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps_logsumexp, call.dropout, call.is_causal, scale=call.scale
        )[0]
    return output


def run_math(call: AttentionCall) -> torch.Tensor:
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
        # The values of fake ones would be computed on the CPU as well, in every layer, and nothing reads them.
        ones = torch.empty if isinstance(query, FakeTensor) else torch.ones
        causal = ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
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


@functools.cache
def register(capability: tuple[int, int], flash: bool = False) -> tuple[Library, ...]:
    """Route the fake GPU's attention as a GPU of this compute capability would, while the libraries returned are held.

    With `flash`, attention must run as the flash kernel.
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
        choose = require_flash if flash else choose_kernel
        kernel = choose(capability, call)
        if kernel == "math" and is_causal and hasattr(query, "_local_tensor"):  # a part of a sequence, as a DTensor
            raise RecordingFailed(NOT_FUSED)
        for other in list(same_kernels):
            try:
                same = choose(other, call) == kernel
            except InvalidValue:
                same = False
            if not same:
                same_kernels.remove(other)
        return run_math(call) if kernel == "math" else run_fused(kernel, call)

    kernel_memory.SCRATCH.update(attention_scratch(capability))
    # Inference mode skips the autograd key, so the backend's own key needs the routing too.
    libraries = tuple(Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1"))
    for library in libraries:
        library.impl("scaled_dot_product_attention", attention)
    return libraries
