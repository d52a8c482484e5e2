"""BERT-large as transformers' Trainer trained it in January 2022, on PyTorch of that time.

The layers are today's; attention, the mask and the optimizers are written after transformers 4.15.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertForSequenceClassification
from transformers.optimization import Adafactor

from batchfinder.reproductions.bert_2019_model import KeepingSoftmax
from batchfinder.training.optimizers import AdamW8bitStates
from batchfinder.training.step import Workload

OF_2022 = "attention_of_2022"


def build(optimizer: str, checkpointing: bool) -> Workload:
    """bert-large-uncased with a head for two classes, in fp32.

    Args:
        optimizer: one of `OPTIMIZERS`.
        checkpointing: whether each layer is recomputed in the backward.
    """
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, use_cache=False
    )
    model = BertForSequenceClassification._from_config(config, attn_implementation=OF_2022)
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = GeluInFloat32()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": torch.zeros(batch_size, dtype=torch.int64),
        }

    return Workload(model, make_batch, optimizer=OPTIMIZERS[optimizer])


def attention_of_2022(
    module: nn.Module, query: Any, key: Any, value: Any, mask: torch.Tensor, scaling: float, dropout: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attention written out: `BertSelfAttention.forward` of transformers 4.15.0.

    With autocast the mask, which is of fp32, makes the scores fp32 before the softmax.
    """
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores * scaling
    scores = scores + mask
    shares: torch.Tensor = KeepingSoftmax.apply(scores)  # type: ignore[no-untyped-call]
    shares = nn.functional.dropout(shares, dropout, module.training)
    context = torch.matmul(shares, value)
    return context.transpose(1, 2).contiguous(), None


class GeluInFloat32(nn.Module):
    """GELU, which autocast computed in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x.float())


def mask_of_2022(attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
    """What is added to the scores: fp32 (batch, 1, 1, tokens), as the weights are."""
    return (1.0 - attention_mask[:, None, None, :].float()) * -10000.0


AttentionInterface.register(OF_2022, attention_of_2022)
AttentionMaskInterface.register(OF_2022, mask_of_2022)


class _KeepsGradients(torch.optim.Optimizer):
    """The Trainer called `model.zero_grad()`, which filled the gradients with zeros before PyTorch 2.0."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


class HuggingFaceAdamW(_KeepsGradients):
    """transformers' own AdamW, the Trainer's default: one parameter after the other, with one temporary of its size."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"])


class HuggingFaceAdafactor(_KeepsGradients, Adafactor):
    """transformers' Adafactor with the Trainer's settings."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=5e-5, scale_parameter=False, relative_step=False)


class Adam8bitOf2022(_KeepsGradients, AdamW8bitStates):
    """bitsandbytes' Adam8bit, which had a scale for each block of 2048 elements."""

    block = 2048


OPTIMIZERS = {"AdamW": HuggingFaceAdamW, "Adafactor": HuggingFaceAdafactor, "Adam8bit": Adam8bitOf2022}
