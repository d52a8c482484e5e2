"""Llama 3.1 8B as torchtitan had it at the end of 2024: sharded by FSDP2, eager and compiled.

Written after torchtitan/models/llama/model.py, norms.py and parallelisms/parallelize_llama.py at
https://github.com/pytorch/torchtitan/tree/9dec370ad26b5f8e9a7333a0e36165018262644b.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from batchfinder.training.step import Workload

VOCABULARY = 128256
Rotate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_SAVED = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default)


def rotate_complex(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, tokens, heads, head size) by complex numbers (tokens, head size / 2), in fp32."""
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    turned = pairs * angles.view(1, heads.size(1), 1, -1)
    return torch.view_as_real(turned).flatten(3).type_as(heads)


class RmsNorm(nn.Module):
    """RMSNorm in fp32, its weight applied in the input's type."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.weight


class Block(nn.Module):
    """Attention and a gated feed-forward layer; keys and values are copied for the query heads that share them."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int, rotate: Rotate, heads_first: bool) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head = heads, key_heads, width // heads
        self.rotate, self.heads_first = rotate, heads_first
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.head, bias=False)
        self.value = nn.Linear(width, key_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.attention_norm, self.forward_norm = RmsNorm(width), RmsNorm(width)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, key heads, head size) as (batch, heads, tokens, head size), copied."""
        batch, tokens, shared, head = x.shape
        times = self.heads // shared
        if self.heads_first:
            return x.transpose(1, 2).unsqueeze(2).expand(batch, shared, times, tokens, head).flatten(1, 2)
        expanded = x.unsqueeze(3).expand(batch, tokens, shared, times, head)
        return expanded.reshape(batch, tokens, self.heads, head).transpose(1, 2)

    def attention(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Causal attention over (batch, tokens, width)."""
        batch, tokens, _ = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        query = self.rotate(query.view(batch, tokens, self.heads, self.head), angles)
        key = self.rotate(key.view(batch, tokens, self.key_heads, self.head), angles)
        value = value.view(batch, tokens, self.key_heads, self.head)
        repeated = self.repeated(key), self.repeated(value)
        mixed = F.scaled_dot_product_attention(query.transpose(1, 2), *repeated, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, tokens, -1))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        hidden = x + self.attention(self.attention_norm(x), angles)
        normed = self.forward_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Checkpointed(nn.Module):
    """A block whose backward computes it again; with option `op` not its attention and every second matrix product."""

    def __init__(self, block: nn.Module, per_operator: bool) -> None:
        super().__init__()
        self.block = block
        self.options = {"context_fn": _selective_contexts} if per_operator else {}

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> Any:
        return checkpoint(self.block, x, angles, use_reentrant=False, preserve_rng_state=False, **self.options)


def _selective_contexts() -> Any:
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operator == torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        saved = operator in _SAVED and not (is_product and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """Token embedding, blocks, a norm and the logits, (batch, tokens, vocabulary)."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, angles: torch.Tensor, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(blocks)
        self.norm = RmsNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.embedding.weight
        self.register_buffer("angles", angles)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.angles[: tokens.size(1)])
        logits: torch.Tensor = self.output(self.norm(hidden))
        return logits


def batch_of_tokens(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
    """Token ids; they stand for the labels too."""
    return (torch.zeros(batch_size, seq_len or 1, dtype=torch.int64),)


def _loss(logits: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[0].flatten())


def _apply_fsdp(model: nn.Module, mesh: Any) -> None:
    """As `apply_fsdp` of parallelisms/parallelize_llama.py: bf16 parameters, fp32 sums, the last block not resharded.

    The model is on the meta device until it is sharded, as in train.py. The root was never resharded after the forward
    then, whatever it was asked for (PyTorch of 2024, `FSDPState._lazy_init`).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.to("meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=layer is not layers[-1])
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def build(checkpointing: str, compiled: str) -> Workload:
    """One GPU of several with FSDP2.

    Args:
        checkpointing: `none`, `full`, `every 2` for every second block, or `op`.
        compiled: what `torch.compile` has: nothing where empty, `blocks` (each, before it is sharded, as
            `apply_compile` of parallelize_llama.py does), or `blocks and loss`.
    """
    width, heads, inner, length = 4096, 32, 14336, 8192
    turns = torch.arange(2 * length)[:, None] * 500000 ** -(torch.arange(0, width // heads, 2) / (width // heads))
    angles = torch.polar(torch.ones_like(turns), turns)
    blocks: list[nn.Module] = []
    for number in range(1, 33):
        block: Any = Block(width, heads, 8, inner, rotate_complex, heads_first=False)
        if checkpointing in ("full", "op") or (checkpointing == "every 2" and number % 2 == 0):
            block = Checkpointed(block, per_operator=checkpointing == "op")
        blocks.append(torch.compile(block, fullgraph=True) if compiled else block)
    model = Llama(blocks, width, angles, tied=False)
    loss = torch.compile(_loss) if compiled == "blocks and loss" else _loss
    return Workload(model, batch_of_tokens, loss, _adamw, parallelize=_apply_fsdp, sums_in_place=True)
