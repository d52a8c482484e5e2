"""transformers' models as fms-acceleration's benchmark trains them: checkpointed layers, AdamW, one GPU or FSDP.

The models are those of the installed transformers; the losses are the rows' own:
https://github.com/huggingface/transformers/blob/v4.48.1/src/transformers/loss/loss_utils.py (`ForCausalLMLoss`) and
https://github.com/huggingface/transformers/blob/v4.45.2/src/transformers/models/granite/modeling_granite.py. The fused
kernels are written for what they allocate and keep, after plugins/fused-ops-and-kernels of
https://github.com/foundation-model-stack/fms-acceleration/tree/876e2ed6fc4e966785e3f4315f5ee3cdf8e3d097.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.mistral.modeling_mistral import repeat_kv

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
_LLAMA = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 8192}
MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "meta-llama/Meta-Llama-3-8B": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, "forward"),
    "bigcode/gpt_bigcode-santacoder": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _SANTACODER, ""),
    "mistralai/Mistral-7B-v0.1": ("MistralForCausalLM", "MistralConfig", _MISTRAL, "loss"),
    "ibm/PowerLM-3b": ("GraniteForCausalLM", "GraniteConfig", _POWERLM, "forward"),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def build(model: str, lora: bool = False, kernels: str = "none", mixed: bool = False) -> Workload:
    """One of `MODELS`; with `lora`, adapters of rank 16 in fp32 train alone.

    Args:
        kernels: `foak-fast-kernels` for fused norms and a fused loss of fp32 logits, `foak-fast-kernels-liger` for the
            norms and Liger's loss of chunks of logits.
        mixed: fp32 weights, computed with and summed in bf16; else all is bf16.
    """
    head, config, figures, widened = MODELS[model]
    built = getattr(transformers, head)._from_config(
        getattr(transformers, config)(**figures),
        dtype=torch.float32 if mixed else torch.bfloat16,
        attn_implementation="repeated" if kernels != "none" and model.startswith("mistralai/") else "sdpa",
    )
    built.config.use_cache = False
    built.loss_function = partial(shifted_loss, wide=widened == "loss")
    for layers in list(built.modules()):
        if isinstance(layers, nn.ModuleList) and len(layers) > 20:
            for number, layer in enumerate(layers):
                layers[number] = Checkpointed(layer)
    if lora:
        import peft

        built.enable_input_require_grads()
        built = peft.get_peft_model(
            built, peft.LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules=TARGETS)
        )
    if kernels != "none":
        for module in built.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(_fused_norm, module)
        fused: nn.Module = FusedLoss(built, chunked=kernels.endswith("-liger"))
    else:
        fused = WidensLogits(built) if widened == "forward" else HoldsKeys(built) if head.startswith("GPT") else built
    return Workload(fused, batch_of_tokens, casts_weights=False, sums_in_place=True)


def repeated_heads(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attention with a copy of keys and values for each head, as Mistral had it in 4.45, and Llama had not.

    https://github.com/huggingface/transformers/blob/v4.45.2/src/transformers/models/mistral/modeling_mistral.py
    """
    key, value = (repeat_kv(each, module.num_key_value_groups) for each in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("repeated", repeated_heads)


class Checkpointed(nn.Module):
    """A layer that is computed again in the backward, by the reentrant kind of checkpointing, with FSDP's unit inside.

    That is what transformers did by default until version 5, where what is checkpointed is inside of the unit:
    https://github.com/huggingface/transformers/blob/v4.45.2/src/transformers/modeling_utils.py
    (`gradient_checkpointing_enable`) and models/llama/modeling_llama.py beside it (`decoder_layer.__call__`).
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(self.layer, **kwargs), hidden, *args, use_reentrant=True)


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
        self._no_split_modules = model._no_split_modules
        self.hidden: list[torch.Tensor] = []
        head: nn.Module = model.get_output_embeddings()
        head.register_forward_pre_hook(lambda _, inputs: self.hidden.append(inputs[0]))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(input_ids=input_ids).logits.float()
        loss = shifted_loss(logits, labels, wide=False)
        self.hidden.clear()
        return {"loss": loss, "logits": logits}


class HoldsKeys(nn.Module):
    """A model whose output holds the keys and values of all layers, as GPTBigCode's did, with checkpointing too.

    They are views of what a layer's one projection has made for queries, keys and values, and keep all of that:
    https://github.com/huggingface/transformers/blob/v4.48.1/src/transformers/models/gpt_bigcode/modeling_gpt_bigcode.py.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules
        self.held: list[torch.Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(".c_attn"):
                module.register_forward_hook(self._hold)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        output = self.model(input_ids=input_ids, labels=labels)
        held, self.held = self.held, []
        return {"loss": output.loss, "logits": output.logits, "past_key_values": held}

    def _hold(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():  # and not when the layer is computed again
            self.held.append(output)


def _fused_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return FusedNorm.apply(hidden, norm.weight)  # type: ignore[no-any-return, no-untyped-call]


class FusedNorm(torch.autograd.Function):
    """Unsloth's RMSNorm (kernels/unsloth/rms_layernorm.py): keeps the input, and the weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(hidden)
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None  # in its place


class FusedLoss(nn.Module):
    """A model with a fused loss: of fp32 logits, or of chunks of logits."""

    def __init__(self, model: Any, chunked: bool) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules
        self.chunked = chunked

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.model.model(input_ids=input_ids).last_hidden_state
        labels = labels[..., 1:].reshape(-1)
        if self.chunked:
            shifted = hidden[..., :-1, :].contiguous().view(-1, hidden.shape[-1])
            return {"loss": LossOfChunks.apply(shifted, self.model.lm_head.weight, labels)}  # type: ignore[no-untyped-call]
        logits = self.model.lm_head(hidden).float()
        shifted = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
        del logits  # as the Trainer lets a model's outputs go before the backward
        return {"loss": LossInPlace.apply(shifted, labels).sum()}  # type: ignore[no-untyped-call]


class LossInPlace(torch.autograd.Function):
    """Unsloth's cross-entropy (kernels/unsloth/cross_entropy_loss.py), whose gradient takes the logits' place."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, losses.clone(), labels)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0], None


class LossOfChunks(torch.autograd.Function):
    """Liger's fused loss as of 2024 (fused_ops/liger_ce): both gradients are made in the forward, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens, chunks = hidden.shape[0], -(-weight.shape[0] // hidden.shape[1])
        size = 1 << (-(-tokens // chunks) - 1).bit_length()
        grad_weight, grad_hidden = torch.zeros_like(weight), torch.zeros_like(hidden)
        losses = hidden.new_zeros(tokens, dtype=torch.float32)
        for start in range(0, tokens, size):
            part = hidden[start : start + size]
            logits = (part @ weight.t()).float()
            grad = logits.to(hidden.dtype)
            grad_hidden[start : start + size] = grad @ weight
            torch.addmm(grad_weight, grad.t(), part, out=grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None
