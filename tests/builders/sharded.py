"""The model of PyTorch's own tests of FSDP2's memory, and workloads that spread it by calls of their own.

Its sizes are those of `Transformer` in torch/testing/_internal/distributed/_tensor/common_dtensor.py of torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from batchfinder.training.step import Workload

LAYERS, WIDTH, HEADS, VOCABULARY, POSITIONS, LENGTH = 3, 768, 12, 32, 16, 4
BLOCK = 4 * WIDTH * WIDTH + 2 * 4 * WIDTH * WIDTH + 5 * WIDTH + 4 * WIDTH
"""Parameters of one block: four projections, two linear layers with biases and two norms."""
REST = 2 * VOCABULARY * WIDTH + POSITIONS * WIDTH + 2 * WIDTH
ALL = LAYERS * BLOCK + REST


class Block(nn.Module):
    """Attention and a feed-forward net, both with a norm before them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        parts = [layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key)]
        value = self.value(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(*parts, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Transformer(nn.Module):
    """Embeddings, blocks, a norm and an output layer that is not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.output(self.norm(x)).float()
        return out


def make_batch(batch_size: int, seq_len: int | None) -> torch.Tensor:
    """Token ids."""
    return torch.randint(0, VOCABULARY, (batch_size, seq_len or LENGTH))


def adam(parameters: Any) -> torch.optim.Optimizer:
    """One parameter after the other: the foreach variant's intermediate results would raise the peak."""
    return torch.optim.Adam(parameters, lr=1e-2, foreach=False)


def transformer(optimizer: Any = adam) -> Workload:
    """The model, with its loss the sum of all outputs."""
    return Workload(Transformer(), make_batch, loss=lambda output, batch: output.sum(), optimizer=optimizer)


def sharded_by_hand(reshard_after_forward: bool = True, offload: bool = False, frozen: bool = False) -> Workload:
    """The same with calls of `fully_shard` of its own; the embeddings and the first block may be frozen."""

    def parallelize(model: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=policy)  # type: ignore[call-overload]
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=policy)  # type: ignore[call-overload]

    model = Transformer()
    for part in (model.tokens, model.positions, model.layers[0]):
        part.requires_grad_(not frozen)
    return _trained(model, parallelize)


def wrapped_by_hand() -> Workload:
    """The same with version 1 of FSDP, of a unit for each block, of which all but the first train, and no more."""

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy, device = ModuleWrapPolicy([Block]), next(model.parameters()).device
        return FullyShardedDataParallel(
            model, device_mesh=mesh, auto_wrap_policy=policy, use_orig_params=True, device_id=device
        )

    model = Transformer()
    model.requires_grad_(False)
    model.layers[1:].requires_grad_(True)
    return _trained(model, parallelize)


def _trained(model: nn.Module, parallelize: Any) -> Workload:
    return Workload(model, make_batch, loss=lambda output, batch: output.sum(), optimizer=adam, parallelize=parallelize)
