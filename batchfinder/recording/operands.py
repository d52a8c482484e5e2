"""What cuBLAS, cuDNN and cuFFT take besides an operator's outputs, since they want their operands in certain layouts.

PyTorch copies what lies in memory otherwise, and hands cuFFT a work area. These are as large as an activation, and gone
when the operator is done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format  # Python's `Tensor::suggest_memory_format`, in torch 2.13

from batchfinder.recording.kernel_memory import SCRATCH, Scratch, aten
from batchfinder.simulator.blocks import round_up

# Operators of cuBLAS, and where their two matrices stand among the arguments.
_PRODUCTS = {
    aten.mm: 0,
    aten.bmm: 0,
    aten.addmm: 1,
    aten.baddbmm: 1,
    aten._addmm_activation: 1,
}

# What the fake kernel of torch 2.13 asks, in torch/_subclasses/fake_impls.py.
_layout_of_backend = torch._C._conv_determine_backend_memory_format

FFT_ASSUMPTION = "cuFFT's work areas: as large as a transform of several dimensions, nothing for those of one"


def register(compiled: bool, capability: tuple[int, int]) -> str:
    """Add these sizes to `SCRATCH`, and let fake convolutions be laid out as CUDA's are, for good.

    PyTorch says that convolutions of a backend outside of its tree are contiguous, and what Inductor makes for it
    relies on that: with `compiled` they stay so. Returns what is assumed.
    """
    for packet, first in _PRODUCTS.items():
        for overload in ("default", "out"):
            SCRATCH[getattr(packet, overload)] = _matrix_copies if first == 0 else _addend_and_matrix_copies
    SCRATCH[aten._fft_c2c.default] = _fft_c2c
    SCRATCH[aten._fft_r2c.default] = _fft_r2c
    SCRATCH[aten._fft_c2r.default] = _fft_c2r

    def as_on_cuda(data: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        if compiled or backend != torch._C._ConvBackend.Overrideable:  # type: ignore[attr-defined]
            layout: torch.memory_format = _layout_of_backend(data, weight, backend)
            return layout
        return convolution_format(data, weight)

    torch._C._conv_determine_backend_memory_format = as_on_cuda  # type: ignore[assignment]
    for operator, scratch in convolution_scratch(capability).items():
        SCRATCH.pop(operator, None)
        if not compiled:
            SCRATCH[operator] = scratch
    return "convolutions of compiled code are taken to be contiguous, not channels last" if compiled else ""


def _matrix_copies(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> list[int]:
    """Copies of the matrices that cuBLAS cannot read as they lie in memory.

    Args:
        left: (rows, inner), or (batch, rows, inner).
        right: (inner, columns), or (batch, inner, columns).
    """
    return [matrix.nbytes for matrix in (left, right) if is_copied_for_cublas(matrix)]


def _addend_and_matrix_copies(
    addend: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any
) -> list[int]:
    return _matrix_copies(left, right)


def is_copied_for_cublas(matrix: torch.Tensor) -> bool:
    """Whether PyTorch copies an operand of a product: neither its rows nor its columns are dense, or some overlap.

    So is the input of an einsum over several batch dimensions whose last one is innermost in memory. A transposed
    matrix is read as it is, also where it is to be conjugated; one that is not transposed is conjugated in a copy. The
    output is taken to be contiguous and of more than one column.

    Args:
        matrix: (rows, columns), or (batch, rows, columns).

    Source: `prepare_matrix_for_cublas` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/cuBlasCommonArgs.h and
    `prepare_batch_matrix_for_cublas` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Blas.cpp; as in PyTorch 1.13.
    """
    if matrix.numel() == 0:
        return False
    (rows, columns), (row, column) = matrix.shape[-2:], matrix.stride()[-2:]
    if column == 1 and row >= max(1, columns):
        return matrix.is_conj()
    if row == 1 and column >= max(1, rows):
        return False
    return not matrix.is_contiguous() or 0 in (row, column) or matrix.is_conj()


def _fft_c2c(x: torch.Tensor, dim: list[int], *_: Any) -> list[int]:
    """The work area of a transform of several dimensions; of more than three, a second tensor like the output.

    cuFFT says how large its work area is only on a GPU. Its `cufftGetSize` said as much as the transform, for matrices
    of 100 x 100 to 100 x 1500 (https://github.com/arrayfire/arrayfire/issues/1443), and so did what was allocated for
    512 x 512 and 512 x 512 x 32 (https://github.com/JuliaGPU/CUDA.jl/issues/894). A transform of one dimension is taken
    to need none: where it does not fit into one kernel, or has a large prime factor, it needs one too.

    Args:
        x: complex, (...).
        dim: the dimensions that are transformed.

    Source: `_fft_c2c_cufft`, `_exec_fft` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/SpectralOps.cpp.
    """
    return [x.nbytes] if len(dim) > 1 else []


def _fft_r2c(x: torch.Tensor, dim: list[int], normalization: int, onesided: bool) -> list[int]:
    """As `_fft_c2c`; and a second tensor like the output, where the transform takes several steps.

    It does in more than three dimensions, or from the first two on, as of a whole matrix: the last dimension first,
    then the others, of which only the half that a real transform has are computed.

    Source: `_fft_r2c_cufft` in the same file.
    """
    length = x.size(dim[-1])
    half = 2 * x.nbytes // length * (length // 2 + 1)
    if len(dim) <= 3 and tuple(dim[:2]) != (0, 1):
        return [half] if len(dim) > 1 else []
    return [half if onesided else 2 * x.nbytes, *([half] if len(dim) > 2 else [])]


def _fft_c2r(x: torch.Tensor, dim: list[int], *_: Any) -> list[int]:
    """A copy of the input, which cuFFT may write over, or all dimensions but the last; and as `_fft_c2c`.

    Source: `_fft_c2r_cufft` in the same file.
    """
    in_one_step = len(dim) <= 3 and tuple(dim[:2]) != (0, 1)
    return [x.nbytes, *([x.nbytes] if len(dim) > (1 if in_one_step else 2) else [])]


def convolution_format(data: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """How CUDA's convolution lays its tensors out: channels last where the input or the weight is, else contiguous.

    Depthwise convolutions run in cuDNN where they are channels last, and in PyTorch's kernel, which is contiguous,
    where not.

    Args:
        data: (batch, channels, ...), of any number of spatial dimensions; one is a row for cuDNN, and contiguous.

    Source: `cudnn_conv_suggest_memory_format` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/ConvUtils.h and `_convolution`,
    `use_cudnn_depthwise` in https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Convolution.cpp.
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(weight.dim())
    if last is None or torch.float64 in (data.dtype, weight.dtype):
        return torch.contiguous_format
    return last if last in (suggest_memory_format(data), suggest_memory_format(weight)) else torch.contiguous_format


def convolution_scratch(capability: tuple[int, int]) -> dict[Any, Scratch]:
    """The entries of `SCRATCH` for convolutions on a GPU of this compute capability."""

    def forward(
        data: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        transposed: bool,
        output_padding: list[int],
        groups: int,
    ) -> list[int]:
        taken = _convolution_copies(data, weight)
        if _is_padded(capability, data, weight, groups):
            sizes = [data.size(0), weight.size(1) if transposed else weight.size(0)]
            for place, length in enumerate(data.shape[2:]):
                # A list of one figure is for all dimensions: so PyTorch has the padding of `padding="valid"`.
                step, edge, spread, more = (
                    figures[place if len(figures) > 1 else 0] for figures in (stride, padding, dilation, output_padding)
                )
                reach = spread * (weight.size(place + 2) - 1)
                if transposed:
                    sizes.append((length - 1) * step - 2 * edge + reach + more + 1)
                else:
                    sizes.append((length + 2 * edge - reach - 1) // step + 1)
            taken += _padded_bytes(data.dtype, data.shape, torch.Size(sizes))
        return taken

    def backward(
        grad: torch.Tensor, data: torch.Tensor, weight: torch.Tensor, bias_sizes: list[int] | None, *rest: Any
    ) -> list[int]:
        taken = _backward_copies(grad, data, weight, bias_sizes, *rest)
        if _is_padded(capability, data, weight, rest[-2]):
            taken += _padded_bytes(data.dtype, data.shape, grad.shape)
        return taken

    return {aten.convolution.default: forward, aten.convolution_backward.default: backward}


def _is_padded(capability: tuple[int, int], data: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether cuDNN pads the channels of such a convolution: one for tensor cores, not laid out channels last."""
    if weight.dim() != 4 or groups != 1 or convolution_format(data, weight) is not torch.contiguous_format:
        return False
    if data.dtype is torch.float32:
        return capability >= (8, 0) and torch.backends.cudnn.allow_tf32
    return data.element_size() == 2 and capability >= (7, 0)


def _padded_bytes(dtype: torch.dtype, *shapes: torch.Size) -> list[int]:
    """cuDNN's workspace for what has to be padded to whole 16 bytes of channels, in all; none where nothing has.

    Images have 3 channels, which become 4 in fp32 (that tensor cores take as TF32) and 8 in half types; a transposed
    convolution whose output has one channel takes four times the output. Whether tensors whose channels need no padding
    are copied from NCHW to NHWC as well depends on the kernel that cuDNN chooses; they are taken not to be.

    Args:
        shapes: (batch, channels, height, width) of the input and of the output.

    Source: "Padding" and "Conversion Between NCHW and NHWC" in
    https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/developer/core-concepts.html; `run_conv_plan` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cudnn/Conv_v8.cpp allocates it.
    """
    whole = 16 // dtype.itemsize
    padded = [shape.numel() // shape[1] * round_up(shape[1], whole) for shape in shapes if shape[1] % whole]
    return [dtype.itemsize * sum(padded)] if padded else []


def _convolution_copies(data: torch.Tensor, weight: torch.Tensor, *_: Any) -> list[int]:
    """Copies of what is laid out otherwise than the convolution is."""
    if weight.dim() not in (4, 5):
        return []
    layout = convolution_format(data, weight)
    return [tensor.nbytes for tensor in (data, weight) if not tensor.is_contiguous(memory_format=layout)]


def _backward_copies(grad: torch.Tensor, data: torch.Tensor, weight: torch.Tensor, *rest: Any) -> list[int]:
    """The same; the input is only copied for the gradient of the weight, and the weight for that of the input.

    Source: `convolution_backward` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/Convolution.cpp and
    `cudnn_convolution_backward` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cudnn/ConvShared.cpp.
    """
    if weight.dim() not in (4, 5):
        return []
    needed = rest[-1]
    read = [grad, *([data] if needed[1] else []), *([weight] if needed[0] else [])]
    layout = convolution_format(data, weight)
    return [tensor.nbytes for tensor in read if not tensor.is_contiguous(memory_format=layout)]
