"""xMem's models, as its jobs build them, and its loops: what a step leaves behind is there while the next one runs.

Written after perf_estimator/trainer/{trainer,train_loop}.py, perf_estimator/models.py and perf_estimator/dataset.py of
https://github.com/Stone-ResearchLife/xMem at d61e0764.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_attn_mask_utils import AttentionMaskConverter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.t5.modeling_t5 import T5Attention

from batchfinder.training.step import Workload

_GPT2 = {"vocab_size": 50257, "n_embd": 768, "n_head": 12}
_DEEPSEEK = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
_LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_NEO = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "attention_types": [[["global", "local"], 6]],
    "window_size": 256,
    "embed_dropout": 0,
    "attention_dropout": 0,
    "resid_dropout": 0,
}
_CEREBRAS = {
    **_GPT2,
    "n_layer": 10,
    "n_positions": 2048,
    "n_inner": 3072,
    "activation_function": "gelu",
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_OPT = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
}
_OPT_350M = {
    **_OPT,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "ffn_dim": 4096,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
_T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}
# The checkpoints' config.json: the class of transformers' config, and what differs from its defaults.
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "EleutherAI/gpt-neo-125M": ("GPTNeo", _NEO),
    "cerebras/Cerebras-GPT-111M": ("GPT2", _CEREBRAS),
    "distilbert/distilgpt2": ("GPT2", {**_GPT2, "n_layer": 6}),
    "openai-community/gpt2": ("GPT2", {**_GPT2, "n_layer": 12}),
    "facebook/opt-125m": ("OPT", _OPT),
    "facebook/opt-350m": ("OPT", _OPT_350M),
    "T5-small": ("T5", {"decoder_start_token_id": 0}),  # the class's defaults are this model
    "t5-base": ("T5", _T5_BASE),
    "meta-llama/Llama-3.2-3B-Instruct": ("Llama", _LLAMA),
    "Qwen/Qwen3-4B": ("Qwen3", _QWEN3),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("Qwen2", _DEEPSEEK),
    "google/gemma-2-2b-it": ("Gemma2", _GEMMA2),
}
_OF_TORCHVISION = {
    "ConvNeXtTiny": "convnext_tiny",
    "ConvNeXtBase": "convnext_base",
    "MobileNetV2": "mobilenet_v2",
    "RegNetX400MF": "regnet_x_400mf",
    "RegNetY400MF": "regnet_y_400mf",
}
"""What torchvision calls them; the others are in small letters."""

IMAGE_SIZE = 86
"""Rows and columns of CIFAR-10's images as xMem resizes them."""

_OPTIMIZERS = {"RMSprop": torch.optim.RMSprop, "Adagrad": torch.optim.Adagrad}


OF_2025 = "sdpa_of_2025"
OPTS_OF_2025 = "opts_sdpa_of_2025"
"""OPT called scaled_dot_product_attention itself in 4.51.3, without a copy: `OPTSdpaAttention` in
https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/opt/modeling_opt.py."""


def text(model: str) -> Workload:
    """A model of transformers in fp32, of random weights; batches are padded to their longest text, with a mask."""
    family, figures = TEXT_MODELS[model]
    head = "T5ForConditionalGeneration" if family == "T5" else f"{family}{_HEADS.get(family, 'ForCausalLM')}"
    config = getattr(transformers, f"{family}Config")(**figures)
    attention = "eager" if family in ("T5", "GPTNeo", "Gemma2") else OPTS_OF_2025 if family == "OPT" else OF_2025
    built = getattr(transformers, head)._from_config(config, dtype=torch.float32, attn_implementation=attention)
    if family == "GPT2":
        hold_causal_masks(built)
    if family == "T5":
        for module in built.modules():
            if isinstance(module, T5Attention):
                module.forward = partial(t5_attention_of_2025, module)

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch_size, seq_len or 1, dtype=torch.int64)
        mask = torch.ones_like(tokens)
        if batch_size > 1:
            mask[-1, -1] = 0  # texts are of different lengths
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}

    return Workload(KeepsOutputs(Held(built, family)), make_batch, sums_in_place=True)


_HEADS = {"GPT2": "LMHeadModel"}


def images(model: str, optimizer: str = "") -> Workload:
    """A model of torchvision in fp32, for images of 86 x 86.

    Args:
        optimizer: `RMSprop` or `Adagrad`; empty for the step's own.
    """
    from torchvision import models

    nn.init.trunc_normal_ = lambda tensor, *args, **kwargs: tensor  # type: ignore[assignment]  # it reads what it has drawn
    if model == "MnasNet":
        net = models.MNASNet(alpha=1.0, num_classes=10)
    elif model.startswith("MobeNetV3"):
        # xMem's own lists of layers, which are those of mobilenet_v3_large and mobilenet_v3_small
        settings, last = models.mobilenetv3._mobilenet_v3_conf(
            f"mobilenet_v3_{model.removeprefix('MobeNetV3').lower()}"
        )
        net = models.MobileNetV3(settings, last_channel=last, num_classes=10)
    else:
        net = getattr(models, _OF_TORCHVISION.get(model, model.lower()))(weights=None)

    def make_batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        pixels = torch.zeros(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
        return {"pixels": pixels, "labels": torch.zeros(batch_size, dtype=torch.int64)}

    made = partial(_OPTIMIZERS[optimizer], lr=1e-3) if optimizer else None
    return Workload(KeepsOutputs(Classifier(net)), make_batch, optimizer=made, seq_len_unit="none", sums_in_place=True)


class Held(nn.Module):
    """A model that returns the keys and values of its layers as they were made.

    A cache kept the first keys and values that it was given, in
    https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/cache_utils.py; today's copies them.
    """

    def __init__(self, model: nn.Module, family: str) -> None:
        super().__init__()
        self.model, self.family = model, family

    def forward(self, **batch: torch.Tensor) -> Any:
        cache: Any = KeysAndValues()
        if self.family == "T5":
            cache = transformers.EncoderDecoderCache(cache, KeysAndValues())
        return self.model(past_key_values=cache, use_cache=True, **batch)


class KeysAndValues(transformers.DynamicCache):  # type: ignore[misc]
    """What a step's layers have made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        self.made.append((key_states, value_states))
        return key_states, value_states


def attention_of_2025(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' attention by scaled_dot_product_attention, after copies of what does not lie in order.

    Source: `sdpa_attention_forward` in
    https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/integrations/sdpa_attention.py.
    """
    return sdpa_attention_forward(module, query.contiguous(), key.contiguous(), value.contiguous(), *args, **kwargs)


def mask_of_2025(attention_mask: torch.Tensor, q_length: int, kv_length: int, *_: Any, **__: Any) -> torch.Tensor:
    """transformers' mask for scaled_dot_product_attention: one of fp32 for all layers, (batch, 1, queries, keys).

    Today's is of truth values, and PyTorch makes one of fp32 of it in each layer.

    Source: `_prepare_4d_causal_attention_mask_for_sdpa` in
    https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/modeling_attn_mask_utils.py.
    """
    least = torch.finfo(torch.float32).min
    mask = AttentionMaskConverter(is_causal=True).to_4d(attention_mask, q_length, torch.float32, kv_length)
    return AttentionMaskConverter._unmask_unattended(mask, min_dtype=least)


def hold_causal_masks(model: nn.Module) -> None:
    """Give each of GPT-2's attentions the two buffers that it had: bool (1, 1, positions, positions), and a number.

    Source: `GPT2Attention` in
    https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/gpt2/modeling_gpt2.py.
    """
    for attention in model.modules():
        if isinstance(attention, GPT2Attention):
            positions = attention.config.max_position_embeddings
            causal = torch.ones(1, 1, positions, positions, dtype=torch.bool).tril()
            attention.register_buffer("bias", causal, persistent=False)
            attention.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)


def t5_attention_of_2025(
    attention: T5Attention,
    hidden_states: torch.Tensor,
    mask: torch.Tensor | None = None,
    key_value_states: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """T5's attention: the first layer added the mask to the position bias, for all, and scores took both in place.

    Today's adds both to the scores in each layer, as new tensors.

    Source: `T5Attention.forward` in
    https://github.com/huggingface/transformers/blob/v4.51.3/src/transformers/models/t5/modeling_t5.py.
    """
    heads = len(hidden_states), -1, attention.n_heads, attention.key_value_proj_dim
    states = hidden_states if key_value_states is None else key_value_states
    query = attention.q(hidden_states).view(heads).transpose(1, 2)
    key = attention.k(states).view(heads).transpose(1, 2)
    value = attention.v(states).view(heads).transpose(1, 2)
    if past_key_values is not None:
        is_self = key_value_states is None
        cache = past_key_values.self_attention_cache if is_self else past_key_values.cross_attention_cache
        key, value = cache.update(key, value, attention.layer_idx)
    scores = query @ key.transpose(3, 2)
    if position_bias is None:
        if attention.has_relative_attention_bias:
            position_bias = attention.compute_bias(*scores.shape[2:], device=scores.device)
        else:
            position_bias = scores.new_zeros(1, *scores.shape[1:])
        if mask is not None:
            position_bias = position_bias + mask
    scores += position_bias
    weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
    weights = nn.functional.dropout(weights, p=attention.dropout, training=attention.training)
    output = (weights @ value).transpose(1, 2).contiguous().view(*hidden_states.shape[:2], attention.inner_dim)
    return attention.o(output), position_bias, weights


ALL_ATTENTION_FUNCTIONS.register(OF_2025, attention_of_2025)
ALL_ATTENTION_FUNCTIONS.register(OPTS_OF_2025, sdpa_attention_forward)
for _name in (OF_2025, OPTS_OF_2025):
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, mask_of_2025)


class Classifier(nn.Module):
    """A net with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class KeepsOutputs(nn.Module):
    """A model whose outputs are held by the loop until the next ones are there: logits, and keys and values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.outputs: Any = None

    def forward(self, **batch: torch.Tensor) -> Any:
        self.outputs = self.model(**batch)
        return self.outputs
