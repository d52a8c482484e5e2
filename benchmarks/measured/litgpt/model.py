"""Lit-GPT's models with LoRA as they were in October 2023, in bf16, with the chunked loss of its finetune/lora.py.

Written after lit_gpt/{model,lora,rmsnorm,utils,config}.py and finetune/lora.py at
https://github.com/Lightning-AI/litgpt/tree/0cc02afa1dca7434418cf612690da13d38d294fd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from batchfinder.models.build import allow_fake_weights
from batchfinder.training.step import Workload

CHUNK = 128
"""Tokens of a chunk of the loss (`lm_head_chunk_size`)."""

RANK, ALPHA, DROPOUT = 8, 16, 0.05
MICRO_BATCHES = 128


@dataclass(frozen=True)
class Config:
    """A model of lit_gpt/config.py."""

    width: int
    heads: int
    layers: int
    vocabulary: int  # as padded
    block_size: int
    rotary: float = 1.0
    inner: int = 0  # of a gated layer; 0 for one of four times the width with GELU
    parallel: bool = True
    shared_norm: bool = False
    bias: bool = True
    head_bias: bool = False


MODELS = {
    "phi-1.5": Config(2048, 32, 24, 51200, 2048, rotary=0.5, shared_norm=True, head_bias=True),
    "StableLM Alpha": Config(4096, 32, 16, 50688, 4096, rotary=0.25),
    "Llama 2 7B": Config(4096, 32, 32, 32000, 4096, inner=11008, parallel=False, bias=False),
    "Llama 2 13B": Config(5120, 40, 40, 32000, 4096, inner=13824, parallel=False, bias=False),
}


def build(model: str, quantization: str = "") -> Workload:
    """One of `MODELS`, with adapters on queries and values.

    Args:
        quantization: `nf4` or `nf4-dq`, as bitsandbytes names them; empty for none.
    """
    gpt = Gpt(MODELS[model])
    with allow_fake_weights():
        gpt.to(torch.bfloat16)
    for name, module in list(gpt.named_modules()) if quantization else ():
        if type(module) is nn.Linear:
            gpt.set_submodule(name, Nf4Linear(module, nested=quantization.endswith("dq")))
    gpt.cosines, gpt.sines = rope(MODELS[model])
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return Workload(FineTuning(gpt), batch_of_tokens, casts_weights=False, sums_in_place=True)


def batch_of_tokens(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    """Token ids, and the targets."""
    tokens = torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens}


def rope(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines in fp32, (block size, rotated features)."""
    features = int(config.rotary * (config.width // config.heads))
    theta = 1.0 / (10000 ** (torch.arange(0, features, 2).float() / features))
    angles = torch.outer(torch.arange(config.block_size).float(), theta).repeat(1, 2)
    return torch.cos(angles), torch.sin(angles)


class FineTuning(nn.Module):
    """A model and its loss. The loop holds the logits until the next are there, so they are there in the backward."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt
        self.logits: Any = None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Fabric gives what a model returns in fp32: `HalfPrecision.convert_output` in
        # https://github.com/Lightning-AI/pytorch-lightning/blob/2.1.0/src/lightning/fabric/plugins/precision/half.py.
        logits = [chunk.float() for chunk in self.gpt(tokens)]
        self.logits = logits
        logits[-1] = logits[-1][..., :-1, :]
        wanted = targets[..., 1:].split(logits[0].size(1), dim=1)
        losses = [
            F.cross_entropy(chunk.reshape(-1, chunk.size(-1)), target.reshape(-1), ignore_index=-1, reduction="none")
            for chunk, target in zip(logits, wanted, strict=True)
        ]
        return torch.cat(losses).mean() / MICRO_BATCHES


class Gpt(nn.Module):
    """Logits in chunks of the sequence."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        norm = RmsNorm if config.inner else nn.LayerNorm
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=config.head_bias)
        cosines, sines = rope(config)
        self.register_buffer("cosines", cosines)
        self.register_buffer("sines", sines)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        length = tokens.size(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosines[:length], self.sines[:length])
        x = self.norm(x)
        return [self.head(chunk) for chunk in x.split(CHUNK, dim=1)]


class Nf4Linear(nn.Module):
    """bitsandbytes' 4-bit layer as of 0.41: half a byte per weight, a scale for each 64, in fp32 or nested."""

    def __init__(self, linear: nn.Linear, nested: bool) -> None:
        super().__init__()
        self.shape = tuple(linear.weight.shape)
        blocks = linear.weight.numel() // 64
        self.bias = linear.bias
        self.register_buffer("codes", torch.zeros(linear.weight.numel() // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(blocks, dtype=torch.uint8 if nested else torch.float32))
        self.register_buffer("outer", torch.zeros(-(-blocks // 256)) if nested else None)

    def forward(self, x: torch.Tensor) -> Any:
        return _Nf4Product.apply(x, self.bias, self.shape, self.codes, self.scales, self.outer)  # type: ignore[no-untyped-call]


class _Nf4Product(torch.autograd.Function):
    """Keeps its input though the weight is frozen; makes the weight for the product in each direction.

    Source: `MatMul4Bit` in
    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.41.0/bitsandbytes/autograd/_functions.py. The input
    is kept no longer since https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1270.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: Any, shape: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.kept, ctx.shape, ctx.parts = x, shape, parts
        return F.linear(x, _weight(shape, *parts), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = grad @ _weight(ctx.shape, *ctx.parts)
        ctx.kept = None
        return made, *[None] * 5


def _weight(shape: tuple[int, int], codes: torch.Tensor, scales: torch.Tensor, outer: Any) -> torch.Tensor:
    """The weight in fp16, which it was quantized from, and then in bf16; after the scales in fp32 if these are nested.

    Source: `Params4bit.cuda` in
    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.41.0/bitsandbytes/nn/modules.py.
    """
    if outer is not None:
        scales = torch.empty(scales.shape, device=scales.device)
    return torch.empty(shape, dtype=torch.float16, device=codes.device).to(torch.bfloat16)


class RmsNorm(nn.Module):
    """RMSNorm that keeps its input in fp32, since https://github.com/Lightning-AI/litgpt/commit/6178c7cc."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return (self.weight * normed).to(x.dtype)


class Block(nn.Module):
    """Attention and a feed-forward layer, one after the other or side by side."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        norm = RmsNorm if config.inner else nn.LayerNorm
        self.config = config
        self.first = norm(config.width)
        self.attention = Attention(config)
        self.second = None if config.shared_norm else norm(config.width)
        self.mlp = Gated(config) if config.inner else Plain(config)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        attended = self.attention(normed, cosines, sines)
        if self.config.parallel:
            return self.mlp(normed if self.second is None else self.second(x)) + attended + x  # type: ignore[no-any-return]
        x = attended + x
        return self.mlp(self.second(x)) + x  # type: ignore[misc, no-any-return]


class Attention(nn.Module):
    """Causal attention whose first matrix makes queries, keys and values together."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = AdaptedQueriesValues(config)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> Any:
        batch, tokens, width = x.shape
        head = width // self.heads
        qkv = self.qkv(x).view(batch, tokens, self.heads, 3, head).permute(0, 2, 3, 1, 4)
        query, key, value = (part.reshape(batch, -1, tokens, head) for part in qkv.split((1, 1, 1), dim=2))
        rotated = cosines.size(-1)
        query, key = (
            torch.cat((turned(part[..., :rotated], cosines, sines), part[..., rotated:]), dim=-1)
            for part in (query, key)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, heads, tokens, features), in fp32."""
    half = x.size(-1) // 2
    turned_by = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cosines) + (turned_by * sines)).type_as(x)


class AdaptedQueriesValues(nn.Module):
    """The matrix of queries, keys and values, with adapters for the first and the last (`LoRAQKVLinear`)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.linear = nn.Linear(width, 3 * width, bias=config.bias)
        self.lora_a = nn.Parameter(torch.zeros(2 * RANK, width))
        self.lora_b = nn.Parameter(torch.zeros(2 * width, RANK))
        self.places = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x: torch.Tensor) -> Any:
        base = self.linear(x)
        inner = F.linear(F.dropout(x, DROPOUT, self.training), self.lora_a)
        added = F.conv1d(inner.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        return base + self.padded(added) * (ALPHA / RANK)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, 2 x width) with zeros for the keys; `index_copy` keeps what it has copied."""
        x = x.transpose(0, 1)
        outputs = 3 * self.lora_a.size(1)
        result = x.new_zeros((*x.shape[:-1], outputs)).view(-1, outputs)
        places = torch.tensor(self.places, device=result.device)
        result = result.index_copy(1, places, x.reshape(-1, len(self.places)))
        return result.view((*x.shape[:-1], outputs)).transpose(0, 1)


class Plain(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))


class Gated(nn.Module):
    """Two matrices, one through SiLU, and a third of their product."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.inner, bias=config.bias)
        self.up = nn.Linear(config.width, config.inner, bias=config.bias)
        self.down = nn.Linear(config.inner, config.width, bias=config.bias)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))
