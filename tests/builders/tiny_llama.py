"""A Llama small enough for real steps, as a config.json."""

from __future__ import annotations

import json
from pathlib import Path

FIGURES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def config_file(folder: Path) -> str:
    """Its path."""
    file = folder / "config.json"
    file.write_text(json.dumps(FIGURES))
    return str(file)
