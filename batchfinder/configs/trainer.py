"""`TrainingArguments` of transformers, and what TRL and LLaMA-Factory add to them, as JSON or YAML.

Keys and defaults: `transformers/training_args.py` of transformers 5;
https://github.com/huggingface/trl/blob/main/trl/trainer/model_config.py, `base_config.py` and `sft_config.py` there;
https://github.com/hiyouga/LLaMA-Factory/tree/main/src/llamafactory/hparams.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchfinder.configs import deepspeed
from batchfinder.configs.record import TrainingConfig

TRAINING_ARGUMENTS, TRL, LLAMA_FACTORY = "TrainingArguments", "TRL", "LLaMA-Factory"
KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "num_train_epochs", "learning_rate")
TRL_KEYS = (
    *("use_peft", "lora_r", "max_length", "max_seq_length", "packing", "dataset_text_field", "attn_implementation"),
    *("torch_dtype", "load_in_4bit", "load_in_8bit", "assistant_only_loss", "padding_free", "dataset_mixture"),
)
LLAMA_FACTORY_KEYS = ("finetuning_type", "cutoff_len", "stage", "template")

_OPTIMIZERS = {"paged_adamw_32bit": "paged-adamw-8bit", "adamw_torch_8bit": "adamw-8bit"}
_OFFLOADED = "activations in the CPU's memory; here on the GPU"
_LEFT_OUT = {
    "activation_offloading": _OFFLOADED,
    "auto_find_batch_size": "the Trainer halves the size itself where it does not fit",
    "optim_target_modules": "a low-rank optimizer",
    "parallelism_config": "tensor or context parallelism: --strategy fsdp2-tp or fsdp2-cp",
    "use_dora": "DoRA; here plain LoRA",
    "lora_modules_to_save": "whole modules that are trained besides adapters",
    "num_generations": "generation, and several answers to a prompt; here one",
    "beta": "pairs of answers and a reference model; here one answer",
}
_LEFT_OUT_OF_LLAMA_FACTORY = {
    "use_galore": "GaLore; here the optimizer itself",
    "use_apollo": "APOLLO; here the optimizer itself",
    "use_badam": "BAdam; here the optimizer itself",
    "use_adam_mini": "Adam-mini; here the optimizer itself",
    "use_muon": "Muon: --optimizer muon",
    "use_unsloth": "unsloth's kernels",
    "use_unsloth_gc": _OFFLOADED,
    "additional_target": "whole modules that are trained besides adapters",
    "use_dora": "DoRA; here plain LoRA",
    "upcast_lmhead_output": "logits in fp32",
    "fp8": "matrix products in fp8; here in bf16",
}


def read_training_arguments(config: TrainingConfig, folder: Path) -> None:
    """The Trainer's own, and a model where the script's arguments name one."""
    _read_model(config)
    _read_step(config, folder)
    if config.get("gradient_checkpointing", "activation_checkpointing") is True:
        key = config.key_of("gradient_checkpointing", "activation_checkpointing")
        config.set("gradient_checkpointing", "full", key)
    bf16, fp16 = config.get("bf16") is True, config.get("fp16") is True
    config.precision("bf16" if bf16 else "fp16" if fp16 else None, False, "bf16" if bf16 else "fp16" if fp16 else "")
    config.notes.append(
        "weights are taken to be in fp32; transformers 5 loads a checkpoint's own type: --precision bf16-true where "
        "that is bf16"
    )


def read_trl(config: TrainingConfig, folder: Path) -> None:
    """With a model's arguments, adapters and a length."""
    _read_model(config)
    _read_step(config, folder)
    config.seq_len("max_length", "max_seq_length", default=1024)
    if config.get("use_peft") is True:
        rank = config.get("lora_r")
        config.lora(rank or 16, config.stated("lora_r"), config.get("lora_target_modules"), "lora_target_modules")
    if config.get("load_in_4bit") is True:
        nested = config.get("use_bnb_nested_quant") is True
        config.set("quantization", "nf4-double" if nested else "nf4", "load_in_4bit")
    elif config.get("load_in_8bit") is True:
        config.set("quantization", "int8", "load_in_8bit")
    if config.get("gradient_checkpointing") is not False:
        config.set("gradient_checkpointing", "full", config.stated("gradient_checkpointing"))
    if (attention := config.get("attn_implementation")) is not None:
        config.attention(attention, "attn_implementation")
    if config.get("packing") is True or config.get("padding_free") is True:
        config.set("packed", True, config.key_of("packing", "padding_free"))
    dtype = str(config.get("dtype", "torch_dtype") or "float32")
    if dtype == "auto":
        config.notes.append("a checkpoint's own type (dtype: auto) is taken to be bf16")
    fp16 = config.get("fp16") is True
    bf16 = config.get("bf16") is not False and not fp16
    half = dtype in ("auto", "bfloat16", "float16")
    key = config.key_of("dtype", "torch_dtype") if half else config.stated("fp16" if fp16 else "bf16")
    config.precision("fp16" if fp16 else "bf16" if bf16 else None, half, key)


def read_llama_factory(config: TrainingConfig, folder: Path) -> None:
    """Of what is trained all is in fp32, but with `pure_bf16`; what is frozen is in the 16-bit type."""
    _read_model(config)
    _read_step(config, folder)
    config.seq_len("cutoff_len", default=2048)
    kind = config.get("finetuning_type") or "lora"
    if kind == "lora":
        targets = config.get("lora_target") or "all"
        rank = config.get("lora_rank")
        named = "all-linear" if targets == "all" else str(targets).replace(" ", "")
        config.lora(rank or 8, config.stated("lora_rank"), named, config.stated("lora_target"))
    elif kind != "full":
        config.left_out["finetuning_type"] = f"{kind}; here all parameters are trained"
    bits = config.get("quantization_bit")
    if bits == 4:
        nested = config.get("double_quantization") is not False
        config.set("quantization", "nf4-double" if nested else "nf4", "quantization_bit")
    elif bits == 8:
        config.set("quantization", "int8", "quantization_bit")
    elif bits is not None:
        config.left_out["quantization_bit"] = f"weights of {bits} bits; here in 16 bits"
    if config.get("disable_gradient_checkpointing") is not True:
        config.set("gradient_checkpointing", "full")
    attention = config.get("flash_attn")
    if attention in ("fa2", "fa3", "sdpa"):
        config.attention(attention, "flash_attn")
    elif attention == "disabled":
        config.set("attention", "eager", "flash_attn")
    if config.get("enable_liger_kernel") is True:
        config.set("loss", "liger", "enable_liger_kernel")
    pure, fp16 = config.get("pure_bf16") is True, config.get("fp16") is True
    bf16 = pure or config.get("bf16") is True
    key = "pure_bf16" if pure else "bf16" if bf16 else "fp16" if fp16 else ""
    half = pure or (kind == "lora" and (bf16 or fp16))
    config.precision("bf16" if bf16 else "fp16" if fp16 else None, half, key)
    if config.get("stage") not in (None, "sft", "pt"):
        config.left_out["stage"] = f"{config.get('stage')}; here one answer is trained"
    config.leave_out(_LEFT_OUT_OF_LLAMA_FACTORY)


def _read_model(config: TrainingConfig) -> None:
    config.set("model", config.get("model_name_or_path"), "model_name_or_path")


def _read_step(config: TrainingConfig, folder: Path) -> None:
    """Sizes, optimizer and strategy by the names of `TrainingArguments`."""
    config.micro_batch = config.size("per_device_train_batch_size", 8)
    config.accumulation = config.size("gradient_accumulation_steps", 1)
    name = config.get("optim")
    config.optimizer(str(name or "adamw_torch_fused"), config.stated("optim"), _OPTIMIZERS)
    if config.get("torch_compile") is True:
        config.set("compile", "model", "torch_compile")
    if config.get("use_liger_kernel") is True:
        config.set("loss", "liger", "use_liger_kernel")
    deepspeed.read_named(config, "deepspeed", folder)
    fsdp = config.get("fsdp")
    if fsdp:
        words = " ".join(fsdp) if isinstance(fsdp, list) else str(fsdp)
        held = config.get("fsdp_config")
        held = held if isinstance(held, Mapping) else {}
        second = fsdp is True or 2 in (held.get("version"), held.get("fsdp_version"))
        strategy = "fsdp2" if second else "fsdp"
        if "hybrid_shard" in words:
            strategy = "hsdp"
        elif "shard_grad_op" in words:
            strategy += "-shard-grad-op"
        config.set("strategy", strategy, "fsdp")
        if "offload" in words:
            config.left_out["fsdp"] = "parameters in the CPU's memory; here on the GPU"
    config.leave_out(_LEFT_OUT)
