"""Other words for the names in `training.spec`: what Lightning, transformers, accelerate and bitsandbytes call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchfinder.devices.catalog import nearest
from batchfinder.errors import InvalidValue

SYNONYMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "precision": {
        "fp32": ("32", "32-true", "float32", "float", "no", "none", "tf32"),
        "bf16-mixed": ("bf16", "bfloat16"),
        "16-mixed": ("16", "fp16", "float16", "half", "fp16-mixed"),
        "bf16-true": ("pure-bf16", "bfloat16-true"),
    },
    "optimizer": {
        "adamw": ("adamw-torch", "adamw-hf", "torch.optim.adamw"),
        "adamw-fused": ("adamw-torch-fused", "fused-adamw"),
        "adam": ("adam-torch", "torch.optim.adam"),
        "sgd": ("torch.optim.sgd",),
        "adafactor": ("torch.optim.adafactor", "transformers.adafactor"),
        "adamw-offload": (
            *("adamw-cpu-offload", "cpuoffloadoptimizer", "torchao.optim.cpuoffloadoptimizer"),
            "torchao.prototype.low-bit-optim.cpuoffloadoptimizer",
        ),
        "adamw-8bit": ("adamw-bnb-8bit", "adamw-bnb", "adamw8bit", "bitsandbytes.optim.adamw8bit"),
        "paged-adamw-8bit": ("paged-adamw8bit", "pagedadamw8bit", "bitsandbytes.optim.pagedadamw8bit"),
        "adamw-4bit": ("adamw-torch-4bit", "ao-adamw-4bit", "adamw4bit"),
        "lion": ("lion-32bit", "lion-pytorch"),
        "muon": ("torch.optim.muon",),
        "schedule-free": ("schedule-free-adamw", "adamw-schedule-free", "schedulefree"),
    },
    "quantization": {
        "nf4": ("4bit", "load-in-4bit", "bnb-4bit", "bnb-nf4"),
        "nf4-double": ("nf4-nested", "bnb-nf4-dq"),
        "int8": ("8bit", "load-in-8bit", "bnb-8bit", "bnb-int8", "llm-int8"),
    },
    "attention": {
        "flash": ("flash-attention-2", "flash-attention-3", "flash-attention", "flash-attn", "fa2", "fa3"),
        "sdpa": ("sdp", "sdp-attention"),
    },
    "strategy": {
        "ddp": ("multi-gpu", "ddp-find-unused-parameters-true"),
        "zero1": ("zero-1", "deepspeed-stage-1"),
        "zero2": ("zero-2", "deepspeed-stage-2", "deepspeed"),
        "hsdp": ("hybrid-shard",),
    },
    "gradient_checkpointing": {"none": ("no", "false", "off"), "full": ("true", "yes", "on")},
}
"""By an option, as Python has it, and by our name: other words for it, in lower case and with hyphens."""


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """Our name for the value of an option: itself, or what it is another word for; case, `-` and `_` do not matter.

    Args:
        option: as it is typed, or as Python has it.

    Raises:
        InvalidValue: it is none that is allowed; the nearest names are named.
    """
    others = SYNONYMS.get(option.removeprefix("--").replace("-", "_"), {})
    names = {word: name for name, words in others.items() if name in allowed for word in words}
    names |= {name: name for name in allowed}
    wanted = str(value).lower().replace("_", "-")
    if wanted not in names:
        raise InvalidValue(option, value, f"one of {', '.join(allowed)}", nearest(wanted, names, 2))
    return names[wanted]
