"""A linear layer and one more operation on what it makes, (batch, 128, 64): what that operation allocates on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from batchfinder.training.step import Workload

TOKENS, WIDTH = 128, 64


class Layers(nn.Module):
    """What the operations need; each is run on the output of `linear`."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.layer_norm, self.rms_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.dropout, self.attention = nn.Dropout(0.1), nn.MultiheadAttention(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPERATIONS[self.operation](self, self.linear(x))


def scores(x: torch.Tensor) -> torch.Tensor:
    """Of four heads, (batch, 4, 128, 128)."""
    heads = x.view(x.size(0), TOKENS, 4, -1).transpose(1, 2)
    return heads @ heads.transpose(-1, -2)


def classes(x: torch.Tensor) -> torch.Tensor:
    """The first class for each token."""
    return torch.zeros(x.size(0) * TOKENS, dtype=torch.long, device=x.device)


OPERATIONS: dict[str, Callable[[Layers, torch.Tensor], torch.Tensor]] = {
    "attention": lambda layers, x: layers.attention(x, x, x)[0],
    "bce with logits": lambda layers, x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    "concatenation": lambda layers, x: torch.cat([x, x.relu()], -1),
    "cross entropy": lambda layers, x: F.cross_entropy(x.flatten(0, 1), classes(x)),
    "dropout": lambda layers, x: layers.dropout(x),
    "einsum": lambda layers, x: torch.einsum("btc,bsc->bts", x, x),
    "gated": lambda layers, x: F.silu(x) * x,
    "gelu": lambda layers, x: F.gelu(x),
    "group norm": lambda layers, x: F.group_norm(x.transpose(1, 2), 4),
    "huber loss": lambda layers, x: F.huber_loss(x, torch.zeros_like(x)),
    "index": lambda layers, x: x[:, 0],
    "layer norm": lambda layers, x: layers.layer_norm(x),
    "layer norm of a transposed": lambda layers, x: layers.layer_norm(x.transpose(0, 1)),
    "log softmax": lambda layers, x: x.log_softmax(-1),
    "maximum": lambda layers, x: x.max(1)[0],
    "mean": lambda layers, x: x.mean(),
    "mse loss": lambda layers, x: F.mse_loss(x, torch.zeros_like(x)),
    "rms norm": lambda layers, x: layers.rms_norm(x),
    "rms norm of a transposed": lambda layers, x: layers.rms_norm(x.transpose(0, 1)),
    "smooth l1 loss": lambda layers, x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "softmax": lambda layers, x: scores(x).softmax(-1),
    "softmax in fp32": lambda layers, x: F.softmax(scores(x), dim=-1, dtype=torch.float32),
    "two losses": lambda layers, x: layers.linear(x).mean() + layers.linear(x.relu()).mean(),
    "counted": lambda layers, x: x * (x > 0).sum(1, keepdim=True),
    "label smoothing": lambda layers, x: F.cross_entropy(x.flatten(0, 1), classes(x), label_smoothing=0.1),
    "variance": lambda layers, x: x.var(-1),
}


def build(operation: str) -> Workload:
    """A model of one operation."""
    return Workload(Layers(operation), lambda batch_size, seq_len: (torch.zeros(batch_size, TOKENS, WIDTH),))
