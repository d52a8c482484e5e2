"""BERT in eval mode, with the memory that pytorch-transformers took on torch 1.2 in 2019.

The lines follow pytorch-transformers 1.2.0, https://github.com/huggingface/transformers/blob/1.2.0, modeling_bert.py:
which results have a name, and for how long, decides what is in memory together. Four things are as they were then:

1. Softmax kept its input beside its output: `tools/autograd/derivatives.yaml` of that time says `_softmax: self:
   _softmax_backward_data(grad, result, dim, self)`, and `self` is saved for nothing but its type; today it is
   `self.scalar_type()`.
2. Without apex, the layer normalisation of pytorch-transformers 1.0 and 1.1 was written out in Python
   (`class BertLayerNorm`), which keeps three tensors where `torch.nn.LayerNorm`, used from 1.2.0 on, keeps one. The
   published figures are those of the former.
3. `matmul` copied what it was given to contiguous memory (`expand(...).contiguous().view(...)` in
   `aten/src/ATen/native/LinearAlgebra.cpp`); today it takes a view where one is possible: in a batch of one.
4. Gradients of one tensor were summed in a new one; since PyTorch 2.0 it is the first of them (`Workload`).

Dropout is left out: in eval mode it hands on its input.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from batchfinder.training.step import Workload

_VOCABULARY, _POSITIONS, _TYPES, _LABELS = 30522, 512, 2, 2
_EPSILON = 1e-12


class _Size(NamedTuple):
    hidden: int
    layers: int
    heads: int
    intermediate: int


_SIZES = {"base": _Size(768, 12, 12, 3072), "large": _Size(1024, 24, 16, 4096)}
_PRETRAINING = {"classification": False, "pretraining": True}


class _LayerNorm(nn.Module):
    """Keeps the centred input twice (for the square and for the quotient) and the quotient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mean = hidden.mean(-1, keepdim=True)
        variance = (hidden - mean).pow(2).mean(-1, keepdim=True)
        hidden = (hidden - mean) / torch.sqrt(variance + _EPSILON)
        return self.weight * hidden + self.bias


class KeepingSoftmax(torch.autograd.Function):
    """Softmax over the last dimension whose backward holds on to the input."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten._softmax(scores, -1, False)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        scores, result = ctx.saved_tensors
        grad_scores: torch.Tensor = torch.ops.aten._softmax_backward_data(grad, result, -1, scores.dtype)
        return grad_scores


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class _Embeddings(nn.Module):
    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, size.hidden, padding_idx=0)
        self.positions = nn.Embedding(_POSITIONS, size.hidden)
        self.types = nn.Embedding(_TYPES, size.hidden)
        self.norm = _LayerNorm(size.hidden)

    def forward(self, ids: torch.Tensor, type_ids: torch.Tensor) -> torch.Tensor:
        position_ids = torch.arange(ids.size(1), dtype=torch.long, device=ids.device).unsqueeze(0).expand_as(ids)
        words = self.words(ids)
        positions = self.positions(position_ids)
        types = self.types(type_ids)
        embedded: torch.Tensor = words + positions + types
        embedded = self.norm(embedded)
        return embedded  # noqa: RET504 - what was normalised is released first


class _SelfAttention(nn.Module):
    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query = nn.Linear(size.hidden, size.hidden)
        self.key = nn.Linear(size.hidden, size.hidden)
        self.value = nn.Linear(size.hidden, size.hidden)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query = self.query(hidden)
        key = self.key(hidden)
        value = self.value(hidden)
        by_head = (*hidden.shape[:2], self.heads, hidden.size(2) // self.heads)
        query, key, value = (each.view(by_head).permute(0, 2, 1, 3) for each in (query, key, value))
        scores = torch.matmul(query.contiguous(), key.transpose(-1, -2).contiguous())
        scores = scores / math.sqrt(query.size(-1))
        scores = scores + mask
        shares: torch.Tensor = KeepingSoftmax.apply(scores)  # type: ignore[no-untyped-call]
        context = torch.matmul(shares.contiguous(), value.contiguous())
        context = context.permute(0, 2, 1, 3).contiguous()
        return context.view(hidden.shape)


class _Output(nn.Module):
    """A linear layer, added to what went into the block, and normalised."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)
        self.norm = _LayerNorm(outputs)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        normed: torch.Tensor = self.norm(x + before)
        return normed


class _Layer(nn.Module):
    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.attention = _SelfAttention(size)
        self.attention_output = _Output(size.hidden, size.hidden)
        self.intermediate = nn.Linear(size.hidden, size.intermediate)
        self.output = _Output(size.intermediate, size.hidden)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = self.attention_output(self.attention(hidden, mask), hidden)
        expanded = _gelu(self.intermediate(attended))
        output: torch.Tensor = self.output(expanded, attended)
        return output


class _Bert(nn.Module):
    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.embeddings = _Embeddings(size)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.layers))
        self.pooler = nn.Linear(size.hidden, size.hidden)

    def forward(
        self, ids: torch.Tensor, type_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Arguments, as in the original, though never given: they are released in this order.
        attention_mask = torch.ones_like(ids)
        type_ids = torch.zeros_like(ids)
        mask = attention_mask.unsqueeze(1).unsqueeze(2).to(dtype=self.pooler.weight.dtype)
        mask = (1.0 - mask) * -10000.0
        embedded = self.embeddings(ids, type_ids)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden, torch.tanh(self.pooler(hidden[:, 0]))


class _Predictions(nn.Module):
    def __init__(self, size: _Size, words: nn.Embedding) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(_VOCABULARY))
        self.dense = nn.Linear(size.hidden, size.hidden)
        self.norm = _LayerNorm(size.hidden)
        self.decoder = nn.Linear(size.hidden, _VOCABULARY, bias=False)
        self.decoder.weight = words.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(hidden)
        hidden = _gelu(hidden)
        hidden = self.norm(hidden)
        scores: torch.Tensor = self.decoder(hidden) + self.bias
        return scores


class _BertWithHead(nn.Module):
    """The logits of a classification, or in pretraining the scores of words and those of the next sentence."""

    def __init__(self, size: _Size, pretraining: bool) -> None:
        super().__init__()
        self.bert = _Bert(size)
        self.predictions: _Predictions | None = None
        if pretraining:
            self.predictions = _Predictions(size, self.bert.embeddings.words)
        self.pooled_head = nn.Linear(size.hidden, _LABELS)

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, pooled = self.bert(ids)
        if self.predictions is None:
            return self.pooled_head(pooled)
        scores = self.predictions(hidden)
        return scores, self.pooled_head(pooled)


def build(head: str, size: str) -> Workload:
    """A `classification` or `pretraining` model, `base` or `large`, on token ids alone, as the notebook ran it."""

    def token_ids(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
        return (torch.zeros(batch_size, seq_len or _POSITIONS, dtype=torch.long),)

    model = _BertWithHead(_SIZES[size], _PRETRAINING[head]).eval()
    return Workload(model, token_ids, max_seq_len=_POSITIONS)
