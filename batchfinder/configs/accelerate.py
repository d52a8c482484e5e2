"""accelerate's YAML, as `accelerate config` writes it: GPUs, precision and strategy, without model and sizes.

https://github.com/huggingface/accelerate/tree/main/examples/config_yaml_templates.
"""

from __future__ import annotations

from pathlib import Path

from batchfinder.configs import deepspeed
from batchfinder.configs.record import TrainingConfig

TOOL = "accelerate"
KEYS = ("distributed_type", "compute_environment", "num_processes")

_SHARDING = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "fsdp-shard-grad-op",
    "HYBRID_SHARD": "hsdp",
    "NO_SHARD": "ddp",
}
_LEFT_OUT = {
    "fsdp_config.fsdp_offload_params": "parameters in the CPU's memory; here on the GPU",
    "deepspeed_config.offload_optimizer_device": "the optimizer's state in the CPU's memory; here on the GPU",
    "deepspeed_config.offload_param_device": "parameters in the CPU's memory; here on the GPU",
    "megatron_lm_config": "Megatron-LM's parallelism",
    "parallelism_config": "tensor or context parallelism: --strategy fsdp2-tp or fsdp2-cp",
    "fp8_config": "matrix products in fp8; here in bf16",
    "use_cpu": "a training on the CPU: --device cpu",
}


def read(config: TrainingConfig, folder: Path) -> None:
    """The numbers of FULL_SHARD and its like are version 1's own: 1 is FULL_SHARD."""
    mixed = config.get("mixed_precision")
    named = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(str(mixed))
    config.precision(named, False, config.stated("mixed_precision"))
    if mixed == "fp8":
        config.left_out["mixed_precision"] = "matrix products in fp8; here in bf16"
    config.gpus = config.size("num_processes").value
    kind = str(config.get("distributed_type") or "NO")
    if kind == "FSDP":
        sharding = str(config.get("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"))
        if config.get("fsdp_config.fsdp_version") == 2:
            strategy = "fsdp2-shard-grad-op" if sharding in ("False", "SHARD_GRAD_OP") else "fsdp2"
        else:
            numbered = {str(number): name for number, name in enumerate(_SHARDING.values(), 1)}
            strategy = {**_SHARDING, **numbered}.get(sharding, "fsdp")
        config.set("strategy", strategy, "distributed_type")
        if config.get("fsdp_config.fsdp_activation_checkpointing") is True:
            config.set("gradient_checkpointing", "full", "fsdp_config.fsdp_activation_checkpointing")
    elif kind == "DEEPSPEED":
        config.zero(config.get("deepspeed_config.zero_stage"), "deepspeed_config.zero_stage")
        config.accumulation = config.size("deepspeed_config.gradient_accumulation_steps", 1)
        deepspeed.read_named(config, "deepspeed_config.deepspeed_config_file", folder)
    elif kind == "MULTI_GPU":
        config.set("strategy", "ddp", "distributed_type")
    elif kind != "NO":
        config.left_out["distributed_type"] = f"{kind}; here one GPU"
    if str(config.get("dynamo_config.dynamo_backend") or "NO").upper() not in ("NO", "EAGER"):
        config.set("compile", "model", "dynamo_config.dynamo_backend")
    config.leave_out(_LEFT_OUT)
