"""Llama 3.2 3B as torchtune had it in November 2024, as factories: a full fine-tuning in bf16, packed to 4096 tokens.

Written after torchtune/modules and recipes/full_finetune_single_device.py at
https://github.com/pytorch/torchtune/tree/1814feb17a9038e1a8053ce93111bd26774a8db6. There `compile=True` compiles each
layer. The recipe calls `training.compile_loss(self._loss_fn)` and drops what it returns: the loss runs eagerly.
Packed samples are masked by flex attention, compiled, which keeps what flash attention keeps; here they are causal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from batchfinder.training.step import Workload
from benchmarks.measured.torchtitan.model import Block, Llama, batch_of_tokens


def rotate_pairs(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, tokens, heads, head size) by cosines and sines (tokens, head size / 2, 2)."""
    pairs = heads.float().reshape(*heads.shape[:-1], -1, 2)
    cosine, sine = angles.view(1, heads.size(1), 1, -1, 2).unbind(-1)
    turned = torch.stack(
        [pairs[..., 0] * cosine - pairs[..., 1] * sine, pairs[..., 1] * cosine + pairs[..., 0] * sine], -1
    )
    return turned.flatten(3).type_as(heads)


class Float(Llama):
    """With logits in fp32."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).float()


def _loss(logits: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), batch[0].reshape(-1))


def _llama_3b(compiled: bool) -> Workload:
    width, heads, inner, length = 3072, 24, 8192, 4096
    turns = torch.arange(length)[:, None] * 500000 ** -(torch.arange(0, width // heads, 2) / (width // heads))
    angles = torch.stack([turns.cos(), turns.sin()], -1)
    blocks = [Block(width, heads, 8, inner, rotate_pairs, heads_first=True) for _ in range(28)]
    for block in blocks if compiled else ():
        block.compile()
    return Workload(Float(blocks, width, angles, tied=True), batch_of_tokens, _loss)


def eager() -> Workload:
    """The row `+ Packed Dataset`."""
    return _llama_3b(compiled=False)


def compiled() -> Workload:
    """The row `+ Compile`."""
    return _llama_3b(compiled=True)
