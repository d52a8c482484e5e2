"""BERT of 2019: pytorch-transformers 1.2.0's code, and what torch and that library kept for the backward then.

Three differences, each with its reason:

1. Softmax kept its input beside its output: `tools/autograd/derivatives.yaml` of that time says `_softmax: self:
   _softmax_backward_data(grad, result, dim, self)`, and `self` is saved for nothing but its type; today it is
   `self.scalar_type()`. (Division by a Python number kept nothing more than today: `guard_for` in
   `tools/autograd/gen_variable_type.py` saves a dividend only where the divisor wants a gradient.)
2. Without apex, the layer normalisation of pytorch-transformers 1.0 and 1.1 was written out in Python
   (`modeling_bert.py`, `class BertLayerNorm`), which keeps three tensors where `torch.nn.LayerNorm`, used from 1.2.0
   on, keeps one. The published figures are those of the former.
3. `matmul` copied what it was given to contiguous memory (`expand(...).contiguous().view(...)` in
   `aten/src/ATen/native/LinearAlgebra.cpp`); today it takes a view where one is possible: in a batch of one.
"""

from __future__ import annotations

from typing import Any

import pytorch_transformers.modeling_bert as modeling
import torch
import torch.nn.functional as F
from pytorch_transformers import BertConfig, BertForPreTraining, BertForSequenceClassification
from torch import nn

from batchfinder.training.step import Workload

SIZES: dict[str, dict[str, int]] = {
    "base": {},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
HEADS = {"classification": BertForSequenceClassification, "pretraining": BertForPreTraining}


class _WrittenOutLayerNorm(nn.Module):
    """Keeps the centred input twice (for the square and for the quotient) and the quotient."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.mean(-1, keepdim=True)
        variance = (hidden - mean).pow(2).mean(-1, keepdim=True)
        hidden = (hidden - mean) / torch.sqrt(variance + self.eps)
        return self.weight * hidden + self.bias


class _KeepingSoftmax(torch.autograd.Function):
    """Softmax whose backward holds on to the input."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        result = torch.ops.aten._softmax(scores, dim, False)
        ctx.save_for_backward(scores, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        scores, result = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, result, ctx.dim, scores.dtype), None


def _softmax(scores: torch.Tensor, dim: int, _stacklevel: int = 3, dtype: Any = None) -> torch.Tensor:
    return _KeepingSoftmax.apply(scores, dim)


def _copying(matmul: Any) -> Any:
    def copying_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dim() >= 3 and right.dim() >= 3:
            left, right = left.contiguous(), right.contiguous()
        return matmul(left, right)

    return copying_matmul


def build(head: str, size: str) -> Workload:
    """The model in eval mode on token ids alone, in a process that keeps what was kept in 2019."""
    F.softmax = _softmax
    torch.matmul = _copying(torch.matmul)
    modeling.BertLayerNorm = _WrittenOutLayerNorm
    model = HEADS[head](BertConfig(vocab_size_or_config_json_file=30522, **SIZES[size]))
    return Workload(model, lambda batch, length: (torch.zeros(batch, length, dtype=torch.long),), max_seq_len=512)
