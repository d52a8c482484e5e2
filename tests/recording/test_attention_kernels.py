"""Tests of batchfinder/recording/sdpa.py: the math kernel is PyTorch's own, on real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.recording.sdpa import AttentionCall, by_hand


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
        output = by_hand(call)
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
