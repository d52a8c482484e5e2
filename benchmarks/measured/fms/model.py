"""transformers' models as fms-acceleration's benchmark trains them: bf16 weights, every layer checkpointed, AdamW.

The models are those of the installed transformers; the losses are the rows' own:
https://github.com/huggingface/transformers/blob/v4.48.1/src/transformers/loss/loss_utils.py (`ForCausalLMLoss`) and
https://github.com/huggingface/transformers/blob/v4.45.2/src/transformers/models/granite/modeling_granite.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from batchfinder.training.step import Workload

_MISTRAL = {"sliding_window": None}  # 4096 there, which hides nothing of 4096 tokens; else the class's defaults
_POWERLM = {
    "vocab_size": 49152,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 9.0,
}
_SANTACODER = {"vocab_size": 49280, "n_positions": 2048, "n_embd": 2048, "n_layer": 24, "n_head": 16}
# The class of transformers, its config's figures, and where logits were taken to fp32: nowhere, in the loss function
# with the forward's own beside them (4.48), or in the forward, in their place (4.45).
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bigcode/gpt_bigcode-santacoder": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _SANTACODER, ""),
    "mistralai/Mistral-7B-v0.1": ("MistralForCausalLM", "MistralConfig", _MISTRAL, "loss"),
    "ibm/PowerLM-3b": ("GraniteForCausalLM", "GraniteConfig", _POWERLM, "forward"),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def build(model: str, lora: bool) -> Workload:
    """One of `MODELS`; with `lora`, adapters of rank 16 in fp32 train alone."""
    head, config, figures, widened = MODELS[model]
    built = getattr(transformers, head)._from_config(
        getattr(transformers, config)(**figures), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    built.config.use_cache = False
    built.loss_function = partial(shifted_loss, wide=widened == "loss")
    built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora:
        import peft

        built.enable_input_require_grads()
        built = peft.get_peft_model(
            built, peft.LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=TARGETS)
        )
    return Workload(WidensLogits(built) if widened == "forward" else built, batch_of_tokens, casts_weights=False)


def batch_of_tokens(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    """Packed token ids, and the labels."""
    tokens = torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor, wide: bool, **_: Any) -> torch.Tensor:
    """The loss of a copy of the logits that count, in fp32 where `wide`."""
    if wide:
        logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), labels[..., 1:].reshape(-1))


class WidensLogits(nn.Module):
    """A model whose forward takes its logits to fp32 in their place; the last hidden states are there until it ends."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.hidden: list[torch.Tensor] = []
        head: nn.Module = model.get_output_embeddings()
        head.register_forward_pre_hook(lambda _, inputs: self.hidden.append(inputs[0]))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(input_ids=input_ids).logits.float()
        loss = shifted_loss(logits, labels, wide=False)
        self.hidden.clear()
        return {"loss": loss, "logits": logits}
