"""Frozen weights of 4 or 8 bits: linear layers that take the memory of bitsandbytes' ones, without its kernels.

They make the tensors that bitsandbytes 0.50 makes on a GPU, in its order, and compute nothing: on the fake GPU there is
nothing to compute. On a real device, and on PyTorch's CUDA build, bitsandbytes' own layers are used.

Sources, at https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes: autograd/_functions.py
(`MatMul4Bit`, `MatMul8bitLt`), backends/cuda/ops.py (`_dequant_linear_fallback`, `int8_vectorwise_quant`,
`int8_mm_dequant`), functional.py (`quantize_4bit`, `dequantize_4bit`), nn/modules.py (`Linear4bit`, `Linear8bitLt`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional

from batchfinder.errors import MissingExtra

_BLOCK, _BLOCK_OF_STATISTICS = 64, 256
_CODES_4_BIT, _CODES_8_BIT = 16, 256
OUTLIER_THRESHOLD = 6.0
"""transformers' default: columns of the input with a larger element are multiplied in its own type."""


@dataclass(frozen=True)
class Quantization:
    """How weights are held.

    Attributes:
        bits: of one weight.
        nested: whether the scales of 4-bit blocks are held in 8 bits themselves ("double quantization").
    """

    bits: int
    nested: bool = False

    def stand_in(self, linear: nn.Module, features: tuple[int, int], dtype: torch.dtype) -> Linear4bit | Linear8bit:
        """A layer of this kind in the place of one with as many inputs and outputs.

        Args:
            linear: the layer; its bias is kept.
            features: how many inputs and outputs it has.
            dtype: what 4-bit weights are computed in, and the type they had.
        """
        bias: Any = linear.bias
        if self.bits == 8:
            return Linear8bit(*features, bias)
        return Linear4bit(*features, bias, self.nested, dtype, dtype)

    def of_bitsandbytes(self, linear: nn.Module, features: tuple[int, int], dtype: torch.dtype) -> nn.Module:
        """The same with bitsandbytes' own layer, whose weights are quantized as it is moved to a device.

        Raises:
            MissingExtra: it is not installed, or cannot be imported.
        """
        try:
            import bitsandbytes
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == "bitsandbytes"
            reason = "" if missing else str(error)
            raise MissingExtra("bitsandbytes", "quantization", "quantization on a real device", reason) from error
        weight: Any = linear.weight
        layers, bias = bitsandbytes.nn, linear.bias is not None
        made: Any
        if self.bits == 8:
            made = layers.Linear8bitLt(*features, bias, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD)
        else:
            made = layers.Linear4bit(*features, bias, dtype, self.nested, "nf4")
        with unset_fake_temporarily():  # fake weights could not be quantized
            if isinstance(weight, FakeTensor):
                data = torch.empty(features[1], features[0], dtype=weight.dtype)
            elif weight.shape == (features[1], features[0]):
                data = weight.data
            else:  # GPT-2's layers (Conv1D) hold the transposed matrix
                data = weight.data.t().contiguous()
            if self.bits == 8:
                made.weight = layers.Int8Params(data, requires_grad=False, has_fp16_weights=False)
            else:
                made.weight = layers.Params4bit(
                    data, requires_grad=False, compress_statistics=self.nested, quant_type="nf4", module=made
                )
        made.bias = linear.bias
        quantized: nn.Module = made.requires_grad_(False)
        return quantized


QUANTIZATIONS = {
    "nf4": Quantization(4),
    "nf4-double": Quantization(4, nested=True),
    "int8": Quantization(8),
}
"""By the names in `spec.QUANTIZATION_NAMES`."""


_own_layers = ContextVar("own_layers", default=False)


@contextmanager
def with_bitsandbytes() -> Iterator[None]:
    """Have models that are built in a fake mode get bitsandbytes' own layers, with real weights that nobody writes."""
    token = _own_layers.set(True)
    try:
        yield
    finally:
        _own_layers.reset(token)


def needs_stand_ins() -> bool:
    """Whether a model that is built now is for the fake GPU."""
    return active_fake_mode() is not None and not _own_layers.get()


class Linear4bit(nn.Linear):
    """A linear layer whose weights are packed in pairs, with an fp32 scale for each block of 64.

    `nested` scales are 8-bit themselves, with an fp32 scale for each 256 of them, a table of 256 codes and an offset.

    Args:
        in_features: inputs.
        out_features: outputs.
        bias: a vector as long as the outputs, or None.
        nested: see above.
        compute_dtype: what inputs are cast to; None for the type of the first ones.
        weight_dtype: what the weights were before, and are dequantized to.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        nested: bool,
        compute_dtype: torch.dtype | None,
        weight_dtype: torch.dtype,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.nested, self.compute_dtype, self.weight_dtype = nested, compute_dtype, weight_dtype
        packed = torch.empty((in_features * out_features + 1) // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias: nn.Parameter | None = bias  # type: ignore[assignment]

    def make_statistics(self, device: torch.device) -> None:
        """Allocate what belongs to the weights, on the device they have been moved to."""
        scales = -(-self.in_features * self.out_features // _BLOCK)
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"absmax": ((scales,), torch.float32)}
        if self.nested:
            sizes = {
                "absmax": ((scales,), torch.uint8),
                "nested_absmax": ((-(-scales // _BLOCK_OF_STATISTICS),), torch.float32),
                "nested_code": ((_CODES_8_BIT,), torch.float32),
                "offset": ((), torch.float32),
            }
        sizes["code"] = (_CODES_4_BIT,), torch.float32
        for name, (shape, dtype) in sizes.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs` are (..., in_features); returned is (..., out_features), of their type."""
        if self.compute_dtype is None and inputs.dtype != torch.float16:
            self.compute_dtype = inputs.dtype
        dtype = inputs.dtype
        inputs = inputs if self.compute_dtype is None else inputs.to(self.compute_dtype)
        bias = self.bias
        if bias is not None:
            if bias.dtype != inputs.dtype:
                bias.data = bias.data.to(inputs.dtype)
            bias = bias.to(inputs.dtype)  # type: ignore[assignment]
        trains = torch.is_grad_enabled() and (inputs.requires_grad or (bias is not None and bias.requires_grad))
        multiply: Any = _Multiply4bit.apply if trains else _multiply_4bit
        outputs: torch.Tensor = multiply(inputs, bias, self).to(dtype)
        return outputs

    def dequantize(self) -> torch.Tensor:
        """The weights in the type they had, (out_features, in_features)."""
        absmax: Any = self.absmax
        scales = torch.empty_like(absmax, dtype=torch.float32) if self.nested else None
        weight = self.empty_weight(self.weight_dtype)
        del scales
        return weight

    def empty_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """What weights are dequantized into."""
        return torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.weight.device)


def _multiply_4bit(inputs: torch.Tensor, bias: torch.Tensor | None, layer: Linear4bit) -> torch.Tensor:
    """Dequantize and multiply, as bitsandbytes does for more than 1536 tokens; for fewer it may have one kernel."""
    scales = shifted = None
    if layer.nested:  # both are there until the product is
        absmax: Any = layer.absmax
        offset: Any = layer.offset
        scales = torch.empty_like(absmax, dtype=torch.float32)
        shifted = scales + offset
    weight = layer.empty_weight(inputs.dtype)
    outputs = functional.linear(inputs, weight, bias)
    del shifted, scales, weight
    return outputs


class _Multiply4bit(torch.autograd.Function):
    """Keeps neither the input nor the dequantized weights for the backward, which dequantizes once more."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, layer: Linear4bit) -> torch.Tensor:
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        return _multiply_4bit(inputs, bias, layer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for_input, for_bias, _ = ctx.needs_input_grad
        grad_bias = grad.sum(0, dtype=ctx.bias_dtype) if for_bias else None
        grad_input = torch.matmul(grad, ctx.layer.dequantize().to(grad.dtype)) if for_input else None
        return grad_input, grad_bias, None


class Linear8bit(nn.Linear):
    """A linear layer of int8 weights with an fp32 scale for each row, multiplied with inputs that are quantized too.

    No column of the input is taken to have an outlier, which would be multiplied apart.

    Args:
        in_features: inputs.
        out_features: outputs.
        bias: a vector as long as the outputs, or None.
    """

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(out_features, in_features, dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = bias  # type: ignore[assignment]

    def make_statistics(self, device: torch.device) -> None:
        """Allocate the rows' scales, on the device that the weights have been moved to."""
        self.register_buffer("scales", torch.empty(self.out_features, device=device), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs` are (..., in_features); returned is (..., out_features), of their type."""
        bias = self.bias
        if bias is not None and bias.dtype != inputs.dtype:
            bias.data = bias.data.to(inputs.dtype)
        outputs: torch.Tensor = _Multiply8bit.apply(inputs, bias, self)  # type: ignore[no-untyped-call]
        return outputs


class _Multiply8bit(torch.autograd.Function):
    """Keeps the input, which it does not need: bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, layer: Linear8bit) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1]) if inputs.dim() == 3 else inputs
        quantized, scales = _quantize_rows(rows.to(torch.float16))
        outliers = torch.empty(0, dtype=inputs.dtype, device=inputs.device)
        sums = torch.empty(*rows.shape[:-1], layer.out_features, dtype=torch.int32, device=inputs.device)
        product = torch.empty_like(sums, dtype=torch.float16)
        if bias is not None and bias.dtype != torch.float16:
            product.add_(bias)
        outputs = product.to(inputs.dtype)
        del product, sums, quantized, scales
        ctx.layer, ctx.dtype, ctx.shape = layer, inputs.dtype, inputs.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.kept = (outliers, rows) if any(ctx.needs_input_grad[:1]) else None
        return outputs.reshape(*inputs.shape[:-1], layer.out_features) if inputs.dim() == 3 else outputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for_input, for_bias, _ = ctx.needs_input_grad
        grad_bias = grad.sum(0, dtype=ctx.bias_dtype) if for_bias else None
        if grad.dim() == 3:
            grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        grad_input = None
        if for_input:
            weight = ctx.layer.weight.to(ctx.dtype, copy=True).mul_(ctx.layer.scales.unsqueeze(1).mul(1.0 / 127.0))
            grad_input = torch.matmul(grad.to(ctx.dtype), weight).view(ctx.shape)
        return grad_input, grad_bias, None


def _quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 rows with their scales, after a look for outliers.

    Args:
        rows: fp16, (tokens, features).
    """
    scales = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    quantized = torch.empty_like(rows, dtype=torch.int8)
    outliers = rows.abs() >= OUTLIER_THRESHOLD
    found = outliers.any()
    del found, outliers
    return quantized, scales


def replace_bitsandbytes(model: nn.Module) -> None:
    """Put stand-ins in the place of bitsandbytes' layers, which cannot be moved to the fake GPU."""
    for name, module in list(model.named_modules()):
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("bitsandbytes.")}
        layer: Any = module
        if "Linear4bit" in kinds:
            nested = bool(getattr(layer.weight, "compress_statistics", True))
            dtype = layer.weight.dtype if layer.weight.is_floating_point() else layer.compute_dtype or torch.float16
            stand_in: nn.Module = Linear4bit(
                layer.in_features, layer.out_features, layer.bias, nested, layer.compute_dtype, dtype
            )
        elif "Linear8bitLt" in kinds and not layer.state.has_fp16_weights:
            stand_in = Linear8bit(layer.in_features, layer.out_features, layer.bias)
        else:
            continue
        model.set_submodule(name, stand_in)


def make_statistics(module: nn.Module, device: torch.device) -> None:
    """What a layer whose weights have just been moved to a device allocates there besides."""
    if isinstance(module, Linear4bit | Linear8bit):
        module.make_statistics(device)


def assumptions(model: nn.Module) -> tuple[str, ...]:
    """What is assumed of the stand-ins in a model, in words."""
    kinds = {type(module) for module in model.modules()}
    said = {
        Linear4bit: "products with 4-bit weights are taken to dequantize them, as they do for more than 1536 tokens",
        Linear8bit: "inputs of int8 layers are taken to have no columns with outliers",
    }
    return tuple(words for kind, words in said.items() if kind in kinds)
