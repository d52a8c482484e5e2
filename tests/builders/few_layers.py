"""Models of the zoo at their full width and with few layers: what a layer does to memory shows in two of them."""

from __future__ import annotations

from dataclasses import replace

from batchfinder.models.catalog import find_model
from batchfinder.models.pretrained import workload_from_row
from batchfinder.training.step import Workload

FEW_LAYERS = {
    "bert-base": {"num_hidden_layers": 2},
    "distilbert": {"n_layers": 2},
    "roberta-base": {"num_hidden_layers": 2},
    "gpt2": {"n_layer": 2},
    "t5-small": {"num_layers": 2, "num_decoder_layers": 2},
    "llama-3.2-1b": {"num_hidden_layers": 2},
    "qwen2.5-0.5b": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "vit-base": {"num_hidden_layers": 2},
    "resnet50": {"depths": [1, 2, 1, 1]},
}


def build(spec: str, attention: str | None = None, gradient_checkpointing: bool = False) -> Workload:
    """The zoo's model of that name, shortened."""
    row = find_model(spec)
    workload = workload_from_row(replace(row, config={**row.config, **FEW_LAYERS[spec]}), attention)
    if gradient_checkpointing:
        workload.model.gradient_checkpointing_enable()
    return workload
