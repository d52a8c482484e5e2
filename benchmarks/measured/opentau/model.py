"""OpenTau's cosmos3 policy, as factories: a frozen Qwen3-VL-32B, and an expert that attends to its keys and values.

Written after src/opentau/policies/cosmos3/{qwen3vl_with_expert,modeling_cosmos3}.py at
https://github.com/TensorAuto/OpenTau/tree/31bdaac, the pull request's own commit. The backbone runs without a graph,
and only its keys and values outlive that: its text layers are here, its vision tower is parameters alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from batchfinder.training.step import Workload

PREFIX, CHUNK = 151, 50  # tokens of two pictures and a prompt, and steps of an action
LAYERS, KEY_HEADS, HEAD = 64, 8, 128  # of the backbone and of the expert
ACTION = 32
_VISION = 576_384_496  # parameters of `Qwen3VLVisionModel` with 27 layers of 1152 and three deepstack mergers


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, heads, tokens, head size)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


class Norm(nn.Module):
    """RMSNorm in fp32 (`ExpertRMSNorm`)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class AdaptiveNorm(nn.Module):
    """RMSNorm whose scale, shift and gate come from a condition (`AdaRMSNorm`)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(256, 3 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = x * torch.rsqrt(torch.mean(x.float().square(), dim=-1, keepdim=True) + 1e-6)
        scale, shift, gate = self.dense(condition).chunk(3, dim=-1)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class Attention(nn.Module):
    """Grouped queries with a norm of each head; over `cached` keys and values too where they are given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, heads * HEAD, bias=False)
        self.key, self.value = (nn.Linear(width, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.out = nn.Linear(heads * HEAD, width, bias=False)
        self.query_norm, self.key_norm = Norm(HEAD), Norm(HEAD)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cached: Any, mask: Any) -> Any:
        """The output, and the keys and values of `x` alone."""
        query = self.query_norm(self.query(x).unflatten(2, (-1, HEAD))).transpose(1, 2)
        key = self.key_norm(self.key(x).unflatten(2, (-1, HEAD))).transpose(1, 2)
        value = self.value(x).unflatten(2, (-1, HEAD)).transpose(1, 2)
        query, key = rotate(query, *angles), rotate(key, *angles)
        own = key, value
        if cached is not None:
            key, value = torch.cat([cached[0], key], dim=2), torch.cat([cached[1], value], dim=2)
        times = self.heads // KEY_HEADS
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).flatten(2)), own


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class FrozenLayer(nn.Module):
    """`Qwen3VLTextDecoderLayer` of Qwen3-VL-32B."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = Norm(5120), Norm(5120)
        self.attention, self.gated = Attention(5120, 64), Gated(5120, 25600)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> Any:
        out, own = self.attention(self.attention_norm(x), angles, None, None)
        x = x + out
        return x + self.gated(self.norm(x)), own


class ExpertLayer(nn.Module):
    """`Qwen3ExpertDecoderLayer`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = AdaptiveNorm(1024), AdaptiveNorm(1024)
        self.attention, self.gated = Attention(1024, 16), Gated(1024, 2048)

    def forward(self, x: torch.Tensor, angles: Any, cached: Any, mask: torch.Tensor, condition: torch.Tensor) -> Any:
        normed, gate = self.attention_norm(x, condition)
        x = x + gate * F.dropout(self.attention(normed, angles, cached, mask)[0], 0.1)
        normed, gate = self.norm(x, condition)
        return x + gate * F.dropout(self.gated(normed), 0.1)


class Policy(nn.Module):
    """`Cosmos3FlowMatching`: the loss of (batch, chunk, action) actions after (batch, prefix) tokens."""

    def __init__(self, frozen: torch.dtype | None = None) -> None:
        super().__init__()
        default = torch.get_default_dtype()
        torch.set_default_dtype(frozen or default)
        self.words = nn.Embedding(151936, 5120)
        self.head = nn.Linear(5120, 151936, bias=False)  # there, and not used
        self.vision = nn.Parameter(torch.empty(_VISION))
        self.backbone = nn.ModuleList(FrozenLayer() for _ in range(LAYERS))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        torch.set_default_dtype(default)
        self.expert = nn.ModuleList(ExpertLayer() for _ in range(LAYERS))
        self.norm = AdaptiveNorm(1024)
        self.action_in, self.action_out = nn.Linear(ACTION, 1024), nn.Linear(1024, ACTION)
        self.state = nn.Linear(ACTION, 1024)
        self.time_in, self.time_out = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
        self.condition = nn.Linear(1024, 256)

    def forward(self, tokens: torch.Tensor, actions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch = tokens.size(0)

        def angles(length: int) -> tuple[torch.Tensor, torch.Tensor]:
            made = torch.ones(batch, 1, length, HEAD, dtype=actions.dtype, device=actions.device)
            return made, made.clone()

        cached = []
        with torch.no_grad():
            x, turned = self.words(tokens), angles(PREFIX)
            for frozen in self.backbone:
                x, own = frozen(x, turned)
                cached.append(own)
            del x, turned
        noise = torch.randn_like(actions)
        times = torch.ones(batch, CHUNK + 1, 1024, dtype=actions.dtype, device=actions.device)
        condition = self.condition(F.silu(self.time_out(F.silu(self.time_in(times)))))
        suffix = torch.cat([self.state(actions[:, :1]), self.action_in(noise)], dim=1)
        turned = angles(CHUNK + 1)
        for layer, own in zip(self.expert, cached, strict=True):
            suffix = layer(suffix, turned, own, mask, condition)
        velocity = self.action_out(self.norm(suffix, condition)[0][:, 1:]).float()
        return F.mse_loss(velocity, (noise - actions).float())


def _batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.zeros(batch_size, PREFIX, dtype=torch.int64),
        "actions": torch.zeros(batch_size, CHUNK, ACTION, dtype=torch.bfloat16),
        "mask": torch.ones(batch_size, 1, CHUNK + 1, PREFIX + CHUNK + 1, dtype=torch.bool),
    }


def replicated() -> Workload:
    """For `zero2`, which casts it to bf16."""
    return Workload(Policy(), _batch)


def sharded() -> Workload:
    """ZeRO-3: each layer a unit that is gathered in bf16, what trains in fp32 and the rest in bf16."""

    def shard(policy: Any, mesh: Any) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        small = (policy.norm, policy.action_in, policy.action_out, policy.state)
        for part in (*policy.backbone, *policy.expert, *small, policy.time_in, policy.time_out, policy.condition):
            fully_shard(part, mesh=mesh, mp_policy=mixed)
        fully_shard(policy, mesh=mesh, mp_policy=mixed)

    return Workload(Policy(frozen=torch.bfloat16), _batch, parallelize=shard)
