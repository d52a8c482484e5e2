"""BERT as pytorch-transformers 1.2.0 had it, and the one thing torch 1.2 kept that torch keeps no more."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_transformers import BertConfig, BertForPreTraining, BertForSequenceClassification

from batchfinder.step.workload import Workload

SIZES = {
    "base": {},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
HEADS = {"classification": BertForSequenceClassification, "pretraining": BertForPreTraining}


class _KeepingDivision(torch.autograd.Function):
    """Division by a Python number in torch 1.2, whose backward held on to the dividend."""

    @staticmethod
    def forward(ctx: Any, dividend: torch.Tensor, divisor: float) -> torch.Tensor:
        ctx.save_for_backward(dividend)
        ctx.divisor = divisor
        return dividend.div(divisor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.div(ctx.divisor), None


def _divide(dividend: torch.Tensor, divisor: Any) -> torch.Tensor:
    if isinstance(divisor, (int, float)):
        return _KeepingDivision.apply(dividend, divisor)
    return dividend.div(divisor)


def build(head: str, size: str) -> Workload:
    """The model in eval mode on token ids alone, in a process that divides as torch 1.2 did."""
    torch.Tensor.__truediv__ = _divide  # type: ignore[assignment,method-assign]
    model = HEADS[head](BertConfig(vocab_size_or_config_json_file=30522, **SIZES[size]))
    return Workload(model, lambda batch, length: (torch.zeros(batch, length, dtype=torch.long),), max_seq_len=512)
