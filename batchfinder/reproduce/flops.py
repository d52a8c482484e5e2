"""What recomputing activations costs: the arithmetic of a BERT's training step, counted by its matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def forward_flops(config: Mapping[str, Any], seq_len: int) -> tuple[int, int]:
    """Floating-point operations of one sample's forward, a multiplication and an addition being two.

    Per layer of width h and inner width i, with s tokens: four products of h x h and two of h x i for each token, and
    two of s x h for each token in the attention. Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix
    (24 s h^2 + 4 s^2 h, where i = 4 h). The pooler and the classifier see one token.

    Args:
        config: of a BERT that classifies into two labels.
        seq_len: tokens per sample.

    Returns:
        Those of the layers, which checkpointing repeats, and of what follows them.
    """
    hidden, inner, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    layer = seq_len * (8 * hidden**2 + 4 * hidden * inner) + 4 * seq_len**2 * hidden
    return layers * layer, 2 * hidden**2 + 2 * hidden * config.get("num_labels", 2)


def checkpointing_cost(config: Mapping[str, Any], seq_len: int) -> float:
    """A step's operations with each layer checkpointed, by those of one without: the layers' forward comes twice.

    A backward takes twice its forward (same source), so this is a little under 4/3.

    Args:
        config: of a BERT that classifies into two labels.
        seq_len: tokens per sample.
    """
    layers, rest = forward_flops(config, seq_len)
    return 1 + layers / (3 * (layers + rest))
