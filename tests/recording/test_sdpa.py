"""Tests of batchfinder/recording/sdpa.py: which kernel a card gets, and that the recording has its operators.

The facts are those of PyTorch 2.13's `select_sdp_backend` and the checks it calls, in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash from sm80
on in half types, without a mask and with heads of at most 256; efficient from sm50 on with aligned heads (bf16 from
sm80 on) and no grouped heads; cuDNN first on sm90 and sm100; math for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.recording.sdpa import AttentionCall, choose_kernel, run_math
from batchfinder.simulator.trace import Trace
from tests.builders import small

Record = Callable[..., Trace]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def call(
    dtype: torch.dtype = FP16,
    head: int = 64,
    key_heads: int = 8,
    length: int = 16,
    masked: bool = False,
    grad: bool = True,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> AttentionCall:
    """Arguments on the meta device: 2 samples, 8 heads, 16 queries."""
    query = torch.empty(2, 8, 16, head, dtype=dtype, device="meta", requires_grad=grad)
    key, value = (torch.empty(2, key_heads, length, head, dtype=dtype, device="meta") for _ in range(2))
    mask = torch.empty(2, 1, 16, length, dtype=torch.bool, device="meta") if masked else None
    return AttentionCall(query, key, value, mask, dropout, is_causal, grouped=key_heads != 8)


@pytest.mark.parametrize(
    ("capability", "dtype", "masked", "kernel"),
    [
        ((3, 7), FP32, False, "math"),
        ((5, 2), FP32, False, "efficient"),
        ((6, 1), FP32, False, "efficient"),
        ((6, 1), FP32, True, "efficient"),
        ((6, 1), BF16, False, "math"),
        ((7, 0), FP16, False, "efficient"),
        ((7, 5), BF16, False, "math"),
        ((8, 0), FP32, False, "efficient"),
        ((8, 0), FP16, False, "flash"),
        ((8, 0), BF16, False, "flash"),
        ((8, 0), BF16, True, "efficient"),
        ((8, 9), BF16, False, "flash"),
        ((9, 0), BF16, False, "cudnn"),
        ((9, 0), BF16, True, "cudnn"),
        ((9, 0), FP32, False, "efficient"),
        ((10, 0), FP16, False, "cudnn"),
        ((12, 0), FP16, False, "flash"),
    ],
)
def test_kernel_by_card_type_and_mask(
    capability: tuple[int, int], dtype: torch.dtype, masked: bool, kernel: str
) -> None:
    """Capability, type and mask choose the kernel of an ordinary call."""
    assert choose_kernel(capability, call(dtype, masked=masked)) == kernel


@pytest.mark.parametrize(
    ("capability", "arguments", "kernel"),
    [
        ((8, 0), {"head": 256}, "flash"),
        ((8, 0), {"head": 264}, "efficient"),
        ((8, 0), {"head": 60}, "flash"),  # it is padded to a multiple of 8
        ((8, 0), {"head": 60, "masked": True}, "math"),
        ((8, 0), {"dtype": FP32, "head": 66}, "math"),
        ((7, 0), {"head": 60}, "math"),
        ((6, 1), {"dtype": FP32, "head": 61}, "efficient"),
        # shared memory: sm86 to sm89 and sm120 cannot run the widest heads' backward
        ((8, 6), {"head": 208}, "efficient"),
        ((8, 6), {"head": 208, "grad": False}, "flash"),
        ((8, 6), {"head": 192}, "flash"),
        ((8, 6), {"head": 256}, "flash"),
        ((8, 6), {"head": 256, "dropout": 0.1}, "efficient"),
        ((12, 0), {"head": 208}, "efficient"),
        ((9, 0), {"head": 160}, "cudnn"),
        ((9, 0), {"head": 264}, "efficient"),
        ((10, 0), {"head": 160}, "flash"),
        ((9, 0), {"dropout": 0.1}, "flash"),  # cuDNN wants sixteenths
        ((9, 0), {"dropout": 0.125}, "cudnn"),
        ((9, 0), {"head": 60}, "flash"),
        # grouped heads
        ((8, 0), {"key_heads": 2}, "flash"),
        ((9, 0), {"key_heads": 2}, "cudnn"),
        ((8, 0), {"key_heads": 2, "masked": True}, "math"),
        ((7, 0), {"key_heads": 2}, "math"),
        # a causal mask of the kernel's own wants as many queries as keys
        ((8, 0), {"is_causal": True}, "flash"),
        ((8, 0), {"is_causal": True, "length": 24}, "efficient"),
    ],
)
def test_kernel_by_heads_dropout_and_lengths(
    capability: tuple[int, int], arguments: dict[str, object], kernel: str
) -> None:
    """Head size, shared key heads, dropout and lengths rule kernels out."""
    assert choose_kernel(capability, call(**arguments)) == kernel  # type: ignore[arg-type]


def test_transposed_rows_are_for_math() -> None:
    """A last dimension that is not contiguous is for no fused kernel."""
    plain = call()
    rows = torch.empty(2, 8, 64, 16, dtype=FP16, device="meta").transpose(-1, -2)
    assert choose_kernel((8, 0), AttentionCall(rows, plain.key, plain.value)) == "math"


@pytest.mark.parametrize(
    ("capability", "precision", "options", "forward", "backward"),
    [
        ((6, 1), "fp32", {}, "efficient_attention", "efficient_attention_backward"),
        ((8, 0), "bf16-mixed", {}, "flash_attention", "flash_attention_backward"),
        ((8, 0), "bf16-true", {"key_heads": 2}, "flash_attention", "flash_attention_backward"),
        ((9, 0), "bf16-true", {}, "cudnn_attention", "cudnn_attention_backward"),
        ((6, 1), "bf16-true", {}, "softmax", "_softmax_backward_data"),
    ],
)
def test_recorded_operators(
    record: Record,
    capability: tuple[int, int],
    precision: str,
    options: dict[str, object],
    forward: str,
    backward: str,
) -> None:
    """The routed step has the chosen kernel's operators, forward and backward, and no other kernel's."""
    trace = record(partial(small.attention, **options), 4, 32, capability=capability, precision=precision, steps=1)
    operators = {operator.removeprefix("aten.").partition(".")[0] for operator in trace.structure.operators}
    attention = {name for name in operators if "attention" in name or "softmax" in name}
    assert any(name.endswith(forward) for name in attention), attention
    assert any(name.endswith(backward) for name in attention), attention
    assert not any(
        other in name for other in {"flash", "efficient", "cudnn"} - {forward.partition("_")[0]} for name in attention
    )
    if "attention" in forward:
        assert not any("softmax" in name for name in attention)


def test_fused_kernels_keep_no_scores(record: Record) -> None:
    """What a fused kernel keeps grows with the sequence, what math keeps with its square."""

    def scores(capability: tuple[int, int], length: int) -> int:
        trace = record(small.attention, 2, length, capability=capability, precision="bf16-true", mode="forward")
        kinds = trace.structure.kinds
        return sum(n for n, kind in zip(trace.sizes, kinds, strict=True) if kind == "activation")

    assert scores((8, 0), 512) < 2.1 * scores((8, 0), 256)
    assert scores((6, 1), 512) > 2.8 * scores((6, 1), 256)


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("mask", ["none", "bool", "added", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3, -0.3])
def test_math_is_pytorchs(dtype: torch.dtype, key_heads: int, mask: str, scale: float | None) -> None:
    """The same operators in the same order, but for the mask, which PyTorch adds in place only to ordinary tensors."""
    generator = torch.Generator().manual_seed(0)

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, 8, 16, dtype=dtype, generator=generator).requires_grad_()

    query, key, value = tensor(4), tensor(key_heads), tensor(key_heads)
    masks = {
        "bool": torch.rand(2, 1, 8, 8, generator=generator) > 0.5,
        "added": torch.randn(2, 1, 8, 8, dtype=dtype, generator=generator),
    }
    given, is_causal = masks.get(mask), mask == "causal"
    call = AttentionCall(query, key, value, given, 0.0, is_causal, scale, grouped=key_heads != 4)
    # A bool mask is made one to add before the kernel is called.
    added = _bool_as_added(given, dtype)
    with Operators() as theirs:
        expected = torch.ops.aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            added,
            0.0,
            is_causal,
            None,
            scale=scale,
            enable_gqa=call.grouped,
        )[0]
    with Operators() as ours:
        output = run_math(call)
    torch.testing.assert_close(output, expected)
    ours_without_mask = [name for name in ours.names if name not in _MAKING_A_MASK]
    expected_names = [name.replace("aten.add.Tensor", "aten.add_.Tensor") for name in theirs.names]
    assert ours_without_mask == [name for name in expected_names if name not in _MAKING_A_MASK]
    assert "aten.add.Tensor" not in ours.names


# What makes a mask to add of a bool one: zeros here, a scalar tensor there.
_MAKING_A_MASK = ("aten.logical_not.default", "aten.where.self", "aten.scalar_tensor.default", "aten.zeros.default")


def _bool_as_added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))


@pytest.mark.parametrize(("precision", "others"), [("fp32", {(6, 1), (8, 0), (9, 0)}), ("bf16-mixed", set())])
def test_a_recording_says_on_which_cards_it_is_the_same(
    record: Record, precision: str, others: set[tuple[int, int]]
) -> None:
    """What a recording says of another compute capability is what is recorded there, less what takes no bytes.

    Where a kernel is another one (math before 5.0, for bf16 before 8.0), or takes more blocks, it says nothing.
    """
    trace = record(small.attention, 4, 32, capability=(5, 2), precision=precision)
    assert {(6, 1), (8, 0), (9, 0)} & trace.alike.keys() == (others or {(6, 1)})
    assert (3, 7) not in trace.alike or precision != "fp32"
    for other in others:
        there, sizes = record(small.attention, 4, 32, capability=other, precision=precision), list(trace.sizes)
        for block, size in trace.alike[other]:
            sizes[block] = size
        kept = [(operator, size) for operator, size in zip(trace.structure.operators, sizes, strict=True) if size]
        assert kept == [pair for pair in zip(there.structure.operators, there.sizes, strict=True) if pair[1]]
