"""axolotl's YAML: https://github.com/axolotl-ai-cloud/axolotl/blob/main/src/axolotl/utils/schemas/config.py."""

from __future__ import annotations

from pathlib import Path

from batchfinder.configs import deepspeed
from batchfinder.configs.record import TrainingConfig

TOOL = "axolotl"
KEYS = ("sequence_len", "micro_batch_size", "adapter", "datasets", "num_epochs")  # with `base_model`

_ATTENTION = {"flash_attention": "flash", "sdp_attention": "sdpa", "eager_attention": "eager"}  # older switches
_OPTIMIZERS = {
    "paged_adamw_32bit": "paged-adamw-8bit",
    "ao_adamw_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit",
}
_LEFT_OUT = {
    "activation_offloading": "activations in the CPU's memory; here on the GPU",
    "layer_offloading": "layers in the CPU's memory; here on the GPU",
    "tensor_parallel_size": "layers split over GPUs: --strategy fsdp2-tp",
    "context_parallel_size": "sequences split over GPUs: --strategy fsdp2-cp",
    "sequence_parallel_degree": "sequences split over GPUs: --strategy fsdp2-cp",
    "unfrozen_parameters": "frozen parameters; here all are trained",
    "lora_modules_to_save": "whole modules that are trained besides adapters",
    "lora_target_parameters": "adapters of parameters outside linear layers",
    "peft_use_dora": "DoRA; here plain LoRA",
    "cut_cross_entropy": "a loss that never holds all logits: --loss liger comes near",
    "chunked_cross_entropy": "a loss in pieces: --loss chunked comes near",
    "lora_mlp_kernel": "fused kernels of adapters, which keep less",
    "lora_qkv_kernel": "fused kernels of adapters, which keep less",
    "unsloth_cross_entropy_loss": "unsloth's kernels",
    "rl": "pairs of answers and a reference model; here one answer",
    "gptq": "weights quantized before; here in 16 bits",
    "xformers_attention": "xformers' attention; here PyTorch's",
    "fp8": "matrix products in fp8; here in bf16",
    "optim_target_modules": "a low-rank optimizer",
    "fsdp_config.offload_params": "parameters in the CPU's memory; here on the GPU",
    "fsdp_config.fsdp_offload_params": "parameters in the CPU's memory; here on the GPU",
}


def read(config: TrainingConfig, folder: Path) -> None:
    """Everything but the number of GPUs, which axolotl is told on its command line."""
    config.set("model", config.get("base_model"), "base_model")
    config.seq_len("sequence_len", default=512)
    config.micro_batch = config.size("micro_batch_size", 1)
    config.accumulation = config.size("gradient_accumulation_steps", 1)
    config.effective = config.size("batch_size")
    adapter = config.get("adapter")
    if adapter in ("lora", "qlora", "dora"):
        linear = config.get("lora_target_linear") is True
        targets_key = "lora_target_linear" if linear else "lora_target_modules"
        targets = "all-linear" if linear else config.get("lora_target_modules")
        config.lora(config.get("lora_r") or 8, config.key_of("lora_r"), targets, targets_key)
    elif adapter is not None:
        config.left_out["adapter"] = f"{adapter}; here all parameters are trained"
    if config.get("load_in_4bit") is True:
        # axolotl asks bitsandbytes for nested scales.
        config.set("quantization", "nf4-double", "load_in_4bit")
    elif config.get("load_in_8bit") is True:
        config.set("quantization", "int8", "load_in_8bit")
    bf16, fp16 = config.get("bf16", "bfloat16"), config.get("fp16")
    if fp16 and bf16 in (None, False, "auto"):
        config.precision("fp16", "lora" in config.options, "fp16")
    elif bf16 is False:
        config.precision(None, False, "bf16")
    else:  # `auto`, the default, is bf16 where the GPU has it
        config.precision("bf16", True, config.key_of("bf16", "bfloat16") if bf16 is not None else "")
    name = config.get("optimizer")
    config.optimizer(str(name or "adamw_torch_fused"), config.stated("optimizer"), _OPTIMIZERS)
    checkpointing = config.get("gradient_checkpointing")
    if checkpointing:
        config.set("gradient_checkpointing", "full", "gradient_checkpointing")
        if isinstance(checkpointing, str):
            config.left_out["gradient_checkpointing"] = "kept activations in the CPU's memory; here on the GPU"
    if (attention := config.get("attn_implementation")) is not None:
        config.attention(attention, "attn_implementation")
    for key, ours in _ATTENTION.items():
        if config.get(key) is True:
            config.set("attention", ours, key)
    if config.get("sample_packing") is True:
        config.set("packed", True, "sample_packing")
    if config.get("liger_fused_linear_cross_entropy") is True:
        config.set("loss", "liger", "liger_fused_linear_cross_entropy")
    if config.get("torch_compile") is True:
        config.set("compile", "model", "torch_compile")
    deepspeed.read_named(config, "deepspeed", folder)
    if config.get("fsdp", "fsdp_config"):
        second = 2 in (config.get("fsdp_version"), config.get("fsdp_config.fsdp_version"))
        config.set("strategy", "fsdp2" if second else "fsdp", config.key_of("fsdp_config", "fsdp"))
    config.leave_out(_LEFT_OUT)
