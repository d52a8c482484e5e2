"""MosaicML's MPT as LLM Foundry's benchmarks trained it under FSDP, as a factory.

Written after llmfoundry/models/mpt/modeling_mpt.py and llmfoundry/models/layers/{blocks,attention,ffn,norm}.py at
https://github.com/mosaicml/llm-foundry/tree/b2a43a147 (2023-10-19, with the last tables of one node), and after
`prepare_fsdp_module` and `get_mixed_precision` of composer/trainer at https://github.com/mosaicml/composer/tree/v0.16.4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchfinder.training.step import Workload

VOCABULARY = 50368
# Width, heads and layers, of scripts/train/yamls/pretrain/mpt-*.yaml.
MODELS = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}


class _Copied(torch.autograd.Function):
    """What flash-attn's `unpad_input` and `pad_input` do to a batch without padding, and to its gradient."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone(memory_format=torch.contiguous_format)


class _FusedCrossEntropy(torch.autograd.Function):
    """flash-attn's loss: it keeps bf16 logits (tokens, vocabulary), and makes their gradient in a tensor of its own.

    https://github.com/Dao-AILab/flash-attention/blob/v1.0.9/flash_attn/losses/cross_entropy.py
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        exponents = torch.empty(logits.size(0), device=logits.device)
        context.save_for_backward(logits, exponents, labels)
        return torch.empty(logits.size(0), device=logits.device)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(context.saved_tensors[0]), None


class Block(nn.Module):
    """`MPTBlock`: attention and a feed-forward layer of four times the width.

    With `unpads`, as with `attn_impl: flash`, attention's inputs and output are copied.
    """

    def __init__(self, width: int, heads: int, unpads: bool, checkpointed: bool) -> None:
        super().__init__()
        self.heads, self.unpads, self.checkpointed = heads, unpads, checkpointed
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projected, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention over (batch, tokens, width)."""
        parts = self.projected(x).chunk(3, dim=2)
        if self.unpads:
            parts = tuple(_Copied.apply(part) for part in parts)
        heads = [part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(_Copied.apply(mixed) if self.unpads else mixed)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The block without checkpointing."""
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


class Mpt(nn.Module):
    """Tokens' and positions' embeddings, blocks, a norm, and logits (batch, tokens, vocabulary) of the tied weights."""

    def __init__(self, width: int, heads: int, layers: int, positions: int, unpads: bool, checkpointed: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, unpads, checkpointed) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.outputs: torch.Tensor | None = None  # `State.outputs` of Composer's Trainer, there until the next one's

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device)[None])
        for block in self.blocks:
            x = block(x)
        self.outputs = F.linear(self.norm(x), self.tokens.weight)
        return self.outputs


def build(model: str, positions: int, pure: bool, reshards: bool, checkpointed: bool, unpads: bool) -> Workload:
    """One of `MODELS`, each block a unit of FSDP.

    Args:
        positions: the longest sequence, which its position embedding is made for.
        pure: whether gradients are reduced in bf16, as with mixed precision `PURE`, and not in fp32.
        reshards: `FULL_SHARD`, else `SHARD_GRAD_OP`.
        checkpointed: whether every block is computed again in the backward.
        unpads: as of `Block`.
    """
    reduced = torch.bfloat16 if pure else torch.float32

    def apply_fsdp(module: Any, mesh: Any) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        for block in module.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), fused=True)

    built = Mpt(*MODELS[model], positions, unpads, checkpointed)
    return Workload(built, batch_of_tokens, loss, adamw, parallelize=apply_fsdp, sums_in_place=True)


def batch_of_tokens(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
    """Token ids, which are the labels too."""
    return (torch.zeros(batch_size, seq_len or 1, dtype=torch.int64),)


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
    """The mean of flash-attn's losses of the next tokens."""
    labels = torch.roll(batch[0], shifts=-1)
    losses: torch.Tensor = _FusedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten())
    return losses.mean()
