"""Tests of batchfinder/recording/kernel_memory.py: the kernels' own memory, counted by hand."""

from __future__ import annotations

import pytest
import torch

from batchfinder.recording.kernel_memory import (
    attention_scratch,
    efficient_backward_bytes,
    efficient_forward_bytes,
    flash_backward_bytes,
)

HALF, FULL = torch.bfloat16, torch.float32


def heads_of(
    batch: int, heads: int, tokens: int, head: int, dtype: torch.dtype, *, head_order: bool = False
) -> torch.Tensor:
    """A (batch, heads, tokens, head size) tensor as a linear layer leaves it, or as rotary positions do."""
    if head_order:
        return torch.empty(batch, heads, tokens, head, dtype=dtype, device="meta")
    return torch.empty(batch, tokens, heads, head, dtype=dtype, device="meta").transpose(1, 2)


@pytest.mark.parametrize(("head", "padded"), [(64, 64), (40, 64), (96, 96), (136, 192), (256, 256)])
def test_flash_backward(head: int, padded: int) -> None:
    """100 tokens are padded to 128: 2 x 4 x 128 row sums and as many rows of dq, of 4 bytes."""
    tensor = heads_of(2, 4, 100, head, HALF)
    assert flash_backward_bytes(tensor, tensor, tensor, tensor, tensor) == [4096, 4096 * padded]


def test_flash_backward_of_shared_heads() -> None:
    """dk and dv once per query head: 2 bytes x 2 x 100 x 4 x 64 each."""
    query, key = heads_of(2, 4, 100, 64, HALF), heads_of(2, 2, 100, 64, HALF)
    assert flash_backward_bytes(query, query, key, key, query) == [4096, 262_144, 102_400, 102_400]


def test_flash_backward_copies_what_is_not_in_token_order() -> None:
    """Rotary positions leave the query, and with it the output, in head order: 2 bytes x 2 x 4 x 100 x 64 more."""
    query = heads_of(2, 4, 100, 64, HALF)
    out = heads_of(2, 4, 100, 64, HALF, head_order=True)
    assert flash_backward_bytes(query, out, out, out, out) == [102_400, 4096, 262_144]
    assert flash_backward_bytes(out, out, out, out, out) == [102_400, 102_400, 4096, 262_144]


def test_one_head_is_in_both_orders() -> None:
    """A dimension of size 1 has no place in the order."""
    single = heads_of(2, 1, 128, 64, HALF, head_order=True)
    assert flash_backward_bytes(single, single, single, single, single) == [1024, 65_536]


@pytest.mark.parametrize(
    ("capability", "dtype", "head", "sizes"),
    [
        # fp32: delta, and dq of 4 bytes x 8 x 128 x 64.
        ((8, 0), FULL, 64, [4096, 262_144]),
        # No workspace before 7.0: delta, and grad x out and its sum, of which it is made.
        ((6, 1), FULL, 64, [4096, 262_144, 4096]),
        # 72 of 128 columns: the tiles of dq are larger than the product.
        ((8, 0), FULL, 72, [4096, 524_288]),
        ((7, 0), FULL, 72, [4096, 524_288]),
        # Half: the kernel makes delta; dq in fp32.
        ((8, 0), HALF, 64, [4096, 262_144]),
        ((6, 1), HALF, 64, [4096, 262_144]),
        ((8, 0), HALF, 128, [4096, 524_288]),
        ((7, 5), HALF, 128, [4096, 524_288]),
        # Less shared memory: dk and dv in tiles of 64 x 128 as well, 4 bytes x 8 x 64 x 256.
        ((8, 6), HALF, 128, [4096, 1_048_576]),
        ((12, 0), HALF, 128, [4096, 1_048_576]),
        ((8, 6), HALF, 96, [4096, 524_288]),
        # Wide heads: dq 4 x 8 x 128 x 256 and dk, dv 4 x 8 x 64 x 512.
        ((8, 0), HALF, 256, [4096, 2_097_152]),
        # On 7.0 tensor operators make delta of half types too: grad and out in fp32, and their product.
        ((7, 0), HALF, 256, [4096, 1_048_576, 1_048_576, 1_048_576, 4096]),
    ],
)
def test_efficient_backward(capability: tuple[int, int], dtype: torch.dtype, head: int, sizes: list[int]) -> None:
    """2 x 4 heads of 128 tokens, on different GPUs."""
    tensor = heads_of(2, 4, 128, head, dtype)
    assert efficient_backward_bytes(capability, tensor, tensor, tensor) == sizes


def test_efficient_backward_pads_the_tokens() -> None:
    """100 tokens make two tiles of 64, so dq has 128 rows; delta has 100."""
    tensor = heads_of(2, 4, 100, 64, HALF)
    assert efficient_backward_bytes((8, 0), tensor, tensor, tensor) == [3200, 262_144]


def test_efficient_backward_copies_grad() -> None:
    """4 bytes x 2 x 4 x 128 x 64 more when the gradient comes in head order."""
    grad = heads_of(2, 4, 128, 64, FULL, head_order=True)
    assert efficient_backward_bytes((8, 0), grad, grad, grad) == [262_144, 4096, 262_144]


def test_efficient_forward() -> None:
    """Half types with value heads above 128 gather the output in fp32; no one else needs scratch."""
    narrow, wide = heads_of(2, 4, 128, 128, HALF), heads_of(2, 4, 128, 160, HALF)
    assert efficient_forward_bytes(narrow, narrow, narrow) == []
    assert efficient_forward_bytes(narrow, narrow, wide) == [4 * 2 * 4 * 128 * 160]
    full = heads_of(2, 4, 128, 160, FULL)
    assert efficient_forward_bytes(full, full, full) == []


def test_table_takes_the_operators_arguments() -> None:
    """Each entry can be called as its operator is: gradient first in the backwards."""
    table = attention_scratch((8, 0))
    tensor = heads_of(2, 4, 128, 64, FULL)
    backward = table[torch.ops.aten._scaled_dot_product_efficient_attention_backward.default]
    assert backward(tensor, tensor, tensor, tensor, None, tensor, None, 0, 0, 0.0, [True] * 4, scale=1.0) == [
        4096,
        262_144,
    ]
    assert set(table) == {
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    }
