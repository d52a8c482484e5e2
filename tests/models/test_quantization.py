"""Tests of batchfinder/models/quantization.py: stand-ins for bitsandbytes' layers, beside bitsandbytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.errors import MissingExtra
from batchfinder.models.quantization import QUANTIZATIONS, Linear4bit, Linear8bit, replace_bitsandbytes
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import QUANTIZATION_NAMES
from batchfinder.training.step import Workload

Record = Callable[..., Trace]
IN, OUT, TOKENS = 512, 1024, 2048


class Between(nn.Module):
    """A layer between two that train, so that it has a gradient for its input to make."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(8, IN), layer, nn.Linear(OUT, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.after(self.layer(self.before(inputs)))
        return outputs


def around(layer: nn.Module, **more: Any) -> Workload:
    """A workload with that layer in the middle, on sequences of vectors."""
    return Workload(Between(layer), lambda batch_size, seq_len: (torch.zeros(batch_size, TOKENS, 8),), **more)


def of_the_layer(trace: Trace) -> list[tuple[int, str]]:
    """Sizes that the steps allocate in the layer's name, with the stage, and the negative of what goes meanwhile."""
    structure = trace.structure
    (start,) = (mark.position for mark in structure.marks if (mark.step, mark.stage) == (0, "forward"))
    seen = []
    for event in structure.order[start:]:
        block = event if event >= 0 else ~event
        if structure.modules[block] == "layer" and structure.kinds[block] not in ("parameter", "buffer"):
            seen.append((trace.sizes[block] if event >= 0 else -trace.sizes[block], structure.operators[block]))
    return seen


def sizes(events: list[tuple[int, str]]) -> list[int]:
    """Without the operators, which differ where one side's kernel is the other's empty tensor."""
    return [size for size, _ in events]


def statistics(trace: Trace) -> list[int]:
    """Sizes of the weights that do not train and of what belongs to them."""
    return [
        size
        for size, module, kind in zip(trace.sizes, trace.structure.modules, trace.structure.kinds, strict=True)
        if module == "layer" and kind in ("parameter", "buffer")
    ]


def test_names_are_those_of_the_spec() -> None:
    """What can be asked for without torch is what there is."""
    assert tuple(QUANTIZATIONS) == QUANTIZATION_NAMES


def test_4_bit_weights(record: Record) -> None:
    """Half a byte a weight and an fp32 scale for each 64, with a table of 16 codes."""
    trace = record(lambda: around(Linear4bit(IN, OUT, None, False, torch.float32, torch.float32)), 1)
    assert sorted(statistics(trace)) == sorted([IN * OUT // 2, 4 * IN * OUT // 64, 64])


def test_nested_scales(record: Record) -> None:
    """The scales take a byte each, with an fp32 scale for each 256 of them, 256 codes and an offset."""
    trace = record(lambda: around(Linear4bit(IN, OUT, None, True, torch.float32, torch.float32)), 1)
    scales = IN * OUT // 64
    assert sorted(statistics(trace)) == sorted([IN * OUT // 2, scales, 4 * scales // 256, 1024, 64, 4])


def test_8_bit_weights(record: Record) -> None:
    """A byte a weight and an fp32 scale for each row."""
    trace = record(lambda: around(Linear8bit(IN, OUT, None)), 1)
    assert sorted(statistics(trace)) == sorted([IN * OUT, 4 * OUT])


def test_4_bit_keeps_neither_input_nor_weights(record: Record) -> None:
    """Both directions dequantize the weights for themselves."""
    trace = record(lambda: around(Linear4bit(IN, OUT, None, False, torch.bfloat16, torch.bfloat16)), 1)
    rows, weights = TOKENS * 2, 2 * IN * OUT
    forward = [rows * IN, weights, rows * OUT, -weights, 4 * TOKENS * OUT, -rows * OUT, -rows * IN]
    seen = sizes(of_the_layer(trace))
    assert seen[: len(forward)] == forward


def test_8_bit_allocations(record: Record) -> None:
    """int8 rows and their scales, a search for outliers in fp16, int32 sums, and an fp16 product: as in the sources."""
    trace = record(lambda: around(Linear8bit(IN, OUT, None)), 1)
    rows, out = TOKENS * IN, TOKENS * OUT
    quantized = [2 * rows, 4 * TOKENS, rows, 2 * rows, rows, -2 * rows, 1, -1, -rows, -2 * rows]
    product = [4 * out, 2 * out, 4 * out, -2 * out, -4 * out, -rows, -4 * TOKENS]
    seen = [size for size in sizes(of_the_layer(trace)) if size]
    assert seen[: len(quantized) + len(product)] == quantized + product


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_bitsandbytes_allocates_the_same(nested: bool, compute: torch.dtype, record: Record) -> None:
    """Its own `matmul_4bit`, with the way that its CUDA kernels take for many tokens, on tensors of the fake GPU."""
    pytest.importorskip("bitsandbytes")

    def theirs() -> Workload:
        import bitsandbytes.functional as bnb
        from bitsandbytes.autograd._functions import matmul_4bit

        torch._C._cuda_getCurrentRawStream = lambda device: 0  # only a build with CUDA has it
        from bitsandbytes.backends.cuda import ops

        def multiply(*args: Any, bias: Any = None, **more: Any) -> torch.Tensor:
            outputs: torch.Tensor = ops._dequant_linear_fallback(*args, bias, **more)
            return outputs

        ops._dequantize_4bit_impl = ops._dequantize_blockwise_impl = lambda *args, out: None
        torch.ops.bitsandbytes.gemm_4bit = SimpleNamespace(default=multiply)

        class Theirs(Linear4bit):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                codes, inner = self.code, None
                if nested:
                    inner = bnb.QuantState(
                        self.nested_absmax, code=self.nested_code, blocksize=256, dtype=torch.float32
                    )
                state = bnb.QuantState(
                    self.absmax, torch.Size((OUT, IN)), codes, 64, "nf4", compute, getattr(self, "offset", None), inner
                )
                dtype = inputs.dtype
                inputs = inputs.to(compute)
                outputs: torch.Tensor = matmul_4bit(inputs, self.weight, bias=None, quant_state=state).to(dtype)
                return outputs

        return around(Theirs(IN, OUT, None, nested, compute, compute))

    ours = record(lambda: around(Linear4bit(IN, OUT, None, nested, compute, compute)), 1)
    seen, expected = of_the_layer(ours), of_the_layer(record(theirs, 1))
    assert sizes(seen) == sizes(expected)
    assert len(seen) > 12


def test_bitsandbytes_layers_are_replaced(record: Record) -> None:
    """A factory's own layers, with weights of any size, are recorded as the stand-ins that they stand for."""
    bnb = pytest.importorskip("bitsandbytes")
    from batchfinder.models.build import allow_fake_weights

    def theirs(wide: bool) -> Workload:
        with allow_fake_weights():
            four = bnb.nn.Linear4bit(IN, OUT, False, torch.bfloat16, True, "nf4")
            eight = bnb.nn.Linear8bitLt(IN, OUT, False, has_fp16_weights=False, threshold=6.0)
        return around(four if wide else eight)

    def ours(wide: bool) -> Workload:
        return around(
            Linear4bit(IN, OUT, None, True, torch.bfloat16, torch.float32) if wide else Linear8bit(IN, OUT, None)
        )

    for wide in (True, False):
        seen, expected = record(lambda wide=wide: theirs(wide), 1), record(lambda wide=wide: ours(wide), 1)
        assert statistics(seen) == statistics(expected)
        assert of_the_layer(seen) == of_the_layer(expected)


def test_layers_that_hold_fp16_weights_are_left() -> None:
    """bitsandbytes quantizes those anew in every forward, which has no stand-in."""
    bnb = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(bnb.nn.Linear8bitLt(4, 4, has_fp16_weights=True))
    replace_bitsandbytes(model)
    assert isinstance(model[0], bnb.nn.Linear8bitLt)


@pytest.mark.parametrize("name", QUANTIZATION_NAMES)
def test_a_real_device_takes_bitsandbytes(name: str) -> None:
    """Its own layer, with the weights there were; they are quantized as it is moved."""
    bnb = pytest.importorskip("bitsandbytes")
    linear = nn.Linear(64, 128)
    made = QUANTIZATIONS[name].of_bitsandbytes(linear, (64, 128), torch.float32)
    assert isinstance(made, bnb.nn.Linear8bitLt if name == "int8" else bnb.nn.Linear4bit)
    made.to("cpu")
    inputs = torch.rand(8, 64, requires_grad=True)
    outputs = made(inputs)
    outputs.sum().backward()
    assert torch.allclose(outputs, linear(inputs), atol=0.3)
    assert inputs.grad is not None
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_a_real_device_needs_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package and the extra."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra) as caught:
        QUANTIZATIONS["nf4"].of_bitsandbytes(nn.Linear(2, 2), (2, 2), torch.float32)
    assert str(caught.value).startswith("quantization on a real device needs bitsandbytes, which ")
