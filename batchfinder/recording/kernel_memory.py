"""Memory that CUDA's kernels take for themselves, which no operator's output shows.

The cuBLAS workspace stays: it is taken from the caching allocator the first time that a thread multiplies matrices on a
stream, and the backward runs on a thread of its own, so a training step ends up with two. Scratch tensors come and go
within one kernel; those that are as large as an activation are modelled, the rest is named in docs/simulator.md.

Tensors of attention are (batch, heads, tokens, head size), as the operators take them; inside, the kernels work on
(batch, tokens, heads, head size) and copy what does not lie in memory in that order.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from batchfinder.errors import RecordingFailed
from batchfinder.recording.fake_device import DEVICE_TYPE
from batchfinder.simulator.alloc_conf import CUBLAS_WORKSPACES
from batchfinder.simulator.blocks import round_up

aten = torch.ops.aten
# Older versions of PyTorch, whose CUDA builds record steps as well, do not have all operators.
_GROUPED_MM = getattr(aten, "_grouped_mm", None)
_RMS_NORM = [
    getattr(aten, name).default for name in ("_fused_rms_norm", "_fused_rms_norm_backward") if hasattr(aten, name)
]
_FP32 = 4
HALF_TYPES = (torch.float16, torch.bfloat16)

# What asks for a cuBLAS handle. An addmm with a bias runs in cuBLASLt, which shares cuBLAS's workspace.
MATRIX_PRODUCTS = frozenset(
    getattr(packet, overload)
    for packet in (
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.baddbmm,
        aten.addbmm,
        aten.mv,
        aten.addmv,
        aten.dot,
        aten.vdot,
        aten._addmm_activation,
    )
    for overload in packet.overloads()  # compiled code calls those with an `out`
)


def product_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Floating-point operations of a matrix product, convolution or attention, by PyTorch's formulas; else 0."""
    packet = getattr(func, "_overloadpacket", None)
    if packet is not None and packet is _GROUPED_MM:  # of which torch 2.13 has no formula
        left, right = args[:2]
        return 2 * int(left.numel()) * int(right.size(-1))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


# Sizes of what a kernel allocates, from the operator's arguments. The recording allocates them after the operator's
# outputs and releases them, last first, at the kernel's end; so what counts is what is alive at one time.
Scratch = Callable[..., list[int]]


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The products of a mixture of experts; PyTorch's fake kernel refuses the types other than bf16, which CUDA takes.

    Rows are padded to 16 bytes. How the tokens are spread over the experts changes nothing about the memory.

    Args:
        left: (groups, rows, inner), or (all rows, inner), or (rows, all inner).
        right: (groups, inner, columns), or (inner, all columns), or (all inner, columns).
        offsets: (groups,), where each group ends, if one of both is a matrix.

    Source: `_grouped_mm_cuda` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/GroupedBlas.cpp and
    `create_grouped_gemm_output_tensor` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/GroupedMMUtils.h.
    """
    dtype = out_dtype or left.dtype
    rows, columns = left.size(-2), right.size(-1)
    padded = round_up(columns, 16 // dtype.itemsize)
    if left.dim() != right.dim():
        return left.new_empty_strided((rows, columns), (padded, 1), dtype=dtype)
    groups = left.size(0) if offsets is None else offsets.size(0)
    return left.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype)


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sequence, and the alphas that the backward reads; sequences are taken to be of one length.

    Args:
        log_probs: (frames, batch, classes).
        targets: (batch, longest), or all one after the other.

    Source: `ctc_loss_gpu_template` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/LossCTC.cu.
    """
    frames, batch = log_probs.size(0), log_probs.size(1)
    longest = targets.size(1) if targets.dim() == 2 else -(-targets.numel() // batch)
    return log_probs.new_empty(batch), log_probs.new_empty((batch, frames, 2 * longest + 1))


def _block_diag(matrices: list[torch.Tensor]) -> torch.Tensor:
    """The matrix that CUDA fills block by block; PyTorch's fake kernel runs operators for each block.

    Source: `block_diag` in https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/TensorShape.cpp.
    """
    dtype = functools.reduce(torch.promote_types, [matrix.dtype for matrix in matrices])
    shapes = [(1, 1, *matrix.shape)[-2:] for matrix in matrices]
    return matrices[0].new_zeros((sum(rows for rows, _ in shapes), sum(columns for _, columns in shapes)), dtype=dtype)


def _in_memory_of_elements(first: torch.Tensor, second: torch.Tensor, reduction: int = 1, *_: Any) -> torch.Tensor:
    """A loss of two tensors; the mean or sum keeps the memory of the losses of all elements, to which it was resized.

    Source: `mse_loss_out` in https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Loss.cpp, whose
    output is allocated for the elements by `TORCH_META_FUNC(mse_loss)`.
    """
    shape = torch.broadcast_shapes(first.shape, second.shape)
    elements = first.new_empty(shape, dtype=torch.promote_types(first.dtype, second.dtype))
    return elements if reduction == 0 else elements.as_strided((), ())


def _bce_with_logits(
    logits: torch.Tensor, target: torch.Tensor, weight: Any = None, positive: Any = None, reduction: int = 1
) -> torch.Tensor:
    return torch.empty_like(logits) if reduction == 0 else logits.new_empty(())


# Operators that have no fake kernel, or one that leaves out memory or types, with what makes their outputs instead.
# `rnn.register` adds cuDNN's.
REPLACED: dict[Any, Callable[..., Any]] = {
    aten.block_diag.default: _block_diag,
    aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    aten.mse_loss.default: _in_memory_of_elements,
    aten.smooth_l1_loss.default: _in_memory_of_elements,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: lambda grad, log_probs, *_: torch.empty_like(log_probs),
    aten._pin_memory.default: lambda tensor, *_: torch.empty_like(tensor),  # the host's memory
}
if _GROUPED_MM is not None:
    REPLACED[_GROUPED_MM.default] = _grouped_mm


def only_writes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator does nothing but write to lists of tensors on the fake GPU, as an optimizer's step does.

    Such a kernel takes no memory and its tensors have no values, so it need not run: computing what it would do to
    hundreds of shapes takes a fifth of a recording's time.
    """
    return _writes_lists(func) and all(tensor.device.type == DEVICE_TYPE for tensor in args[0])


@functools.cache
def _writes_lists(func: Any) -> bool:
    return func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")) and not func._schema.returns


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace: `:4096:2:16:8` (KiB x count pairs), or 32 MiB on Hopper and Blackwell.

    `CUBLAS_WORKSPACE_CONFIG` says otherwise, in such pairs; Lightning sets it to `:4096:8` with `deterministic=True`.
    One workspace belongs to each pair of handle and stream, and a thread has handles of its own. cuBLASLt shares it
    (https://github.com/pytorch/pytorch/pull/168175), so it takes nothing more.

    Source: `parseChosenWorkspaceSize`, `setWorkspaceForHandle` and `getCUDABlasLtWorkspace` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/cuda/CublasHandlePool.cpp; Blackwell since
    https://github.com/pytorch/pytorch/pull/175344.
    """
    asked = re.findall(r":([0-9]+):([0-9]+)", os.environ.get(CUBLAS_WORKSPACES, ""))
    if asked:
        return sum(int(size) * int(count) for size, count in asked) << 10
    return 32 << 20 if capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) << 10


def _safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> list[int]:
    """Which scores and which rows are masked: these rows are filled in the softmax itself.

    Source: `_safe_softmax` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/attention.cpp.
    """
    if scores.numel() == 0:
        return []
    return [scores.numel(), scores.numel() // scores.size(dim)]


def _softmax_backward(grad: torch.Tensor, output: torch.Tensor, *_: Any) -> list[int]:
    """The product of both, which the kernel reads in place of the gradient; log_softmax needs none.

    Source: `softmax_backward_cuda_out` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/SoftMax.cu; as in PyTorch 1.0.
    """
    return [torch.promote_types(grad.dtype, output.dtype).itemsize * output.numel()] if output.numel() else []


def _contiguous_copies(*tensors: torch.Tensor) -> list[int]:
    """What normalization reads is copied where it is not contiguous, as the gradient of a sum is not.

    Source: `layer_norm_cuda`, `layer_norm_backward_cuda` and their RMS versions in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    return [tensor.nbytes for tensor in tensors if not tensor.is_contiguous()]


def _of_elements(first: torch.Tensor, second: torch.Tensor, reduction: int = 1, *_: Any) -> list[int]:
    """The losses of all elements, of which the mean or sum is made."""
    elements = torch.broadcast_shapes(first.shape, second.shape).numel()
    return [elements * torch.promote_types(first.dtype, second.dtype).itemsize] if reduction else []


def _bce_with_logits_bytes(
    logits: torch.Tensor, target: torch.Tensor, weight: Any = None, positive: Any = None, reduction: int = 1
) -> list[int]:
    """The losses of all elements, and their first part.

    Source: `binary_cross_entropy_with_logits` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Loss.cpp.
    """
    return [logits.nbytes] * (2 if reduction else 1)


def _logsumexp(x: torch.Tensor, dims: list[int], keep: bool = False) -> list[int]:
    """The maxima, the exponentials and their sums.

    Source: `logsumexp_out_impl` in https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/ReduceOps.cpp.
    """
    rows = x.nbytes // math.prod(x.size(dim) for dim in dims or range(x.dim())) if x.numel() else 0
    return [rows, x.nbytes, rows]


def type_of_sum(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.dtype, torch.dtype]:
    """The type of a sum's output, and the one that the kernel reads: half types are summed to fp32 as they are.

    Source: `make_reduction_from_out_ty` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/ReduceOpsUtils.h.
    """
    made = dtype or (tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.int64)
    as_it_is = tensor.dtype in HALF_TYPES and made is torch.float32
    return made, tensor.dtype if as_it_is else made


def _sum_copy(
    tensor: torch.Tensor, dims: list[int] | None = None, keep: bool = False, *, dtype: torch.dtype | None = None
) -> list[int]:
    """A copy of another type, as of a mask that is counted."""
    _, read = type_of_sum(tensor, dtype)
    return [] if read == tensor.dtype else [tensor.numel() * read.itemsize]


def _group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    samples: int,
    channels: int,
    pixels: int,
    groups: int,
    needed: list[bool],
) -> list[int]:
    """Two sums for each sample and channel, and two for each sample and group, in fp32.

    Source: `GroupNormBackwardKernelImplInternal` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/group_norm_kernel.cu.
    """
    return [_FP32 * samples * channels] * 2 + [_FP32 * samples * groups] * 2


# `sdpa.register` adds the simulated GPU's attention kernels, `rnn.register` cuDNN's, and `operands.register` what
# cuBLAS, cuDNN's convolutions and cuFFT take.
SCRATCH: dict[Any, Scratch] = {
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.binary_cross_entropy_with_logits.default: _bce_with_logits_bytes,
    aten.huber_loss.default: _of_elements,
    aten.logsumexp.default: _logsumexp,
    aten.mse_loss.default: _of_elements,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.sum.default: _sum_copy,
    aten.sum.dim_IntList: _sum_copy,
    aten.smooth_l1_loss.default: _of_elements,
    aten.native_layer_norm.default: lambda x, *_: _contiguous_copies(x),
    aten.native_layer_norm_backward.default: lambda grad, x, *_: _contiguous_copies(grad, x),
    # The betas, which are as large as the alphas.
    aten._ctc_loss_backward.Tensor: lambda *args: [args[6].nbytes],
}
for count, norm in enumerate(_RMS_NORM, 1):  # of the input, and in the backward of the gradient as well
    SCRATCH[norm] = lambda *args, count=count: _contiguous_copies(*args[:count])


# Operators that take their scratch before their outputs: copies of what is not contiguous.
SCRATCH_FIRST = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        *_RMS_NORM,
    }
)


def flash_backward_bytes(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    *_: Any,
    **__: Any,
) -> list[int]:
    """Copies of `grad` and `out` if not in token order; the rows' sums and dq in fp32; dk and dv for shared heads.

    The sums of grad x out and dq are padded to a multiple of 128 tokens, and dq's heads to one of 32 (64 above 128).
    Where query heads share key heads, dk and dv are made once for each query head and summed after that.

    Source: `_flash_attention_backward` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/attention_backward.cu and
    `mha_bwd` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    batch, heads, tokens, head = query.shape
    padded, head_padded = round_up(tokens, 128), round_up(head, 32 if head <= 128 else 64)
    sizes = [tensor.nbytes for tensor in (grad, out) if not _in_token_order(tensor)]
    sizes += [_FP32 * batch * heads * padded, _FP32 * batch * padded * heads * head_padded]
    if key.size(1) != heads:
        sizes += 2 * [query.element_size() * batch * key.size(2) * heads * head]
    return sizes


def packed_backward_bytes(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    sequence_ends: torch.Tensor | None,
    *_: Any,
    **__: Any,
) -> list[int]:
    """As `flash_backward_bytes`, of (tokens, heads, head size): each sequence's rows are padded by 128.

    Args:
        sequence_ends: (sequences + 1,); None for tensors of (batch, tokens, heads, head size).

    Source: `mha_varlen_bwd` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    if sequence_ends is None:
        return flash_backward_bytes(*(tensor.transpose(1, 2) for tensor in (grad, query, key, value, out)))
    tokens, heads, head = query.shape
    padded, head_padded = tokens + 128 * (sequence_ends.numel() - 1), round_up(head, 32 if head <= 128 else 64)
    sizes = [tensor.nbytes for tensor in (grad, out) if not tensor.is_contiguous()]
    sizes += [_FP32 * heads * padded, _FP32 * padded * heads * head_padded]
    if key.size(1) != heads:
        sizes += 2 * [query.element_size() * key.size(0) * heads * head]
    return sizes


def efficient_forward_bytes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> list[int]:
    """The output in fp32, for half types whose value heads are too wide to be kept in registers (above 128).

    Source: `_efficient_attention_forward` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/attention.cu and
    `kNeedsOutputAccumulatorBuffer` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h.
    """
    if query.element_size() == 2 and value.size(-1) > 128:
        return [_FP32 * query.numel() // query.size(-1) * value.size(-1)]
    return []


def efficient_backward_bytes(
    capability: tuple[int, int], grad: torch.Tensor, query: torch.Tensor, value: torch.Tensor
) -> list[int]:
    """A copy of `grad` if not in token order; delta, the rows' sums of grad x out; then the kernel's workspace.

    fp32 kernels (and half ones with wide heads on compute capability 7.0) have delta made by tensor operators, through
    the product in fp32, which is as large as the output. After that comes the workspace: dq in fp32, in tiles, for half
    types and from compute capability 7.0 on for all (the keys are then split between blocks), and tiles of dk and dv
    where these are not kept in registers. Returned is the one of the two moments that is larger for whole tiles.

    Left out: 16 bytes of locks per 16 KiB of dq; the product's row sums where the workspace is as large as the product;
    and that not one but up to 200 / (batch x heads) tiles of dk and dv are made at once.

    Source: `_efficient_attention_backward` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/attention_backward.cu and
    `workspace_size` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h.
    """
    batch, heads, tokens, head = query.shape
    value_head = value.size(-1)
    half = query.element_size() == 2
    tile_queries, tile_keys, in_registers = _tiles(capability, half, max(head, value_head))
    rows = batch * heads

    copies = [] if _in_token_order(grad) else [grad.nbytes]
    delta = _FP32 * rows * tokens

    # Half types are converted first: grad and out, then their product.
    products = 0
    if not half:
        products = 1
    elif not in_registers and (7, 0) <= capability < (7, 5):
        products = 3
    columns = round_up(head, tile_keys) if half or capability >= (7, 0) else 0
    # Decided by the heads alone, so that it is the same at every length.
    if products * value_head > columns:
        return [*copies, delta, *(products * [_FP32 * rows * tokens * value_head]), delta]

    workspace = _FP32 * rows * round_up(tokens, tile_queries) * columns
    if half and not in_registers:
        workspace += _FP32 * rows * tile_keys * (round_up(head, tile_queries) + round_up(value_head, tile_queries))
    return [*copies, delta, workspace]


def attention_scratch(capability: tuple[int, int]) -> dict[Any, Scratch]:
    """The entries of `SCRATCH` for the attention operators of a GPU of this compute capability."""

    def packed_forward(query: torch.Tensor, *_: Any, **__: Any) -> list[int]:
        if capability < (8, 0) or query.element_size() != 2:
            kind = str(query.dtype).removeprefix("torch.")
            raise RecordingFailed(
                "attention over packed samples is PyTorch's flash kernel, which needs compute capability 8.0 and half "
                f"precision; this is {kind} on {capability[0]}.{capability[1]}. Ask for bf16-mixed on a newer GPU, or"
                " do not pack."
            )
        return []

    def efficient_backward(grad: torch.Tensor, *rest: Any, **_: Any) -> list[int]:
        query, _key, value = rest[:3]
        return efficient_backward_bytes(capability, grad, query, value)

    return {
        aten._scaled_dot_product_flash_attention_backward.default: flash_backward_bytes,
        aten._flash_attention_forward.default: packed_forward,
        aten._flash_attention_backward.default: packed_backward_bytes,
        aten._scaled_dot_product_efficient_attention.default: efficient_forward_bytes,
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    }


def _tiles(capability: tuple[int, int], half: bool, head: int) -> tuple[int, int, bool]:
    """Queries and keys per tile of the kernel for this head size, and whether dk and dv stay in its registers.

    The first kernel on the list that supports the head size and fits the GPU's shared memory is taken. Of what fits,
    only this is assumed: the 128 x 128 kernel is too large for the 99 KiB of compute capability 8.6, 8.9 and 12.

    Source: the lists in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernels/cutlassB.h.
    """
    if head <= 64 or capability < (7, 0):
        return 64, 64, half and head <= 64
    if not half:
        return 128 if capability >= (8, 0) else 64, 64, False
    if head > 128 or capability < (8, 0):
        return 128, 64, head <= 128
    if capability in ((8, 6), (8, 9)) and head <= 96:
        return 128, 64, True
    if capability in ((8, 6), (8, 9)) or capability[0] == 12:
        return 64, 64, False
    return 128, 128, True


def _in_token_order(tensor: torch.Tensor) -> bool:
    """Whether a (batch, heads, tokens, head size) tensor is contiguous as (batch, tokens, heads, head size)."""
    expected = 1
    for dim in (3, 1, 2, 0):
        if tensor.size(dim) != 1:
            if tensor.stride(dim) != expected:
                return False
            expected *= tensor.size(dim)
    return True
