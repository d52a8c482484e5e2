"""torchtitan's TOML, up to the commit that made its configs Python code.

https://github.com/pytorch/torchtitan/blob/8a2686c4a/torchtitan/config/job_config.py.
"""

from __future__ import annotations

from pathlib import Path

from batchfinder.configs.record import TrainingConfig
from batchfinder.training.spec import GPUS_PER_NODE

TOOL = "torchtitan"
_FAMILIES = {"llama3": "llama-3.1"}  # whose flavors have the figures of that version
_LEFT_OUT = {
    "training.enable_cpu_offload": "parameters in the CPU's memory; here on the GPU",
    "model.converters": "what converters change, such as matrix products in fp8",
    "parallelism.pipeline_parallel_degree": "a pipeline; here each GPU has all layers",
    "parallelism.expert_parallel_degree": "experts on several GPUs; here each GPU has all",
}
_DEGREES = ("data_parallel_replicate", "tensor_parallel", "context_parallel")


def read(config: TrainingConfig, folder: Path) -> None:
    """The number of GPUs is known where the degree of sharding is stated."""
    name, flavor = str(config.get("model.name") or "llama3"), str(config.get("model.flavor"))
    assets = Path(str(config.get("model.hf_assets_path", "model.tokenizer_path") or "")).name
    config.model(
        ("model.hf_assets_path", assets),
        ("model.flavor", f"{name}-{flavor}"),
        ("model.flavor", f"{_FAMILIES.get(name, name)}-{flavor}"),
    )
    config.seq_len("training.seq_len", default=2048)
    config.micro_batch = config.size(config.key_of("training.local_batch_size", "training.batch_size"), 8)
    config.effective = config.size("training.global_batch_size")
    replicate, tensor, context = (config.size(f"parallelism.{name}_degree", 1).value or 1 for name in _DEGREES)
    key = "parallelism.data_parallel_shard_degree"
    shard = config.size(key).value  # None for -1, all GPUs that there are
    sharded = shard != 1
    split = tensor if tensor > 1 else context
    if shard is not None:
        config.gpus = replicate * shard * tensor * context
    if tensor > 1 and sharded:
        config.set("strategy", "fsdp2-tp", "parallelism.tensor_parallel_degree")
        config.set("tensor_parallel", split, "parallelism.tensor_parallel_degree")
    elif tensor > 1:
        config.set("strategy", "tp", "parallelism.tensor_parallel_degree")
    elif context > 1:
        config.set("strategy", "fsdp2-cp", "parallelism.context_parallel_degree")
        config.set("context_parallel", split, "parallelism.context_parallel_degree")
    elif replicate > 1:
        config.set("strategy", "hsdp" if sharded else "ddp", "parallelism.data_parallel_replicate_degree")
        if shard not in (None, 1, GPUS_PER_NODE):
            config.notes.append(f"hsdp shards over {GPUS_PER_NODE} GPUs here, not {shard}")
    elif sharded:
        never = config.get("parallelism.fsdp_reshard_after_forward") == "never"
        config.set("strategy", "fsdp2-shard-grad-op" if never else "fsdp2", config.stated(key))
    data = config.gpus and config.gpus // (tensor * context)
    micro, whole = config.micro_batch.value, config.effective.value
    steps = 1 if whole is None or not data or micro is None else max(1, whole // (micro * data))
    config.accumulation = config.size("", steps)
    half = config.get("training.dtype") == "bfloat16"
    mixed = config.get("training.mixed_precision_param")
    key = "training.dtype" if half else config.stated("training.mixed_precision_param")
    config.precision(None if mixed == "float32" else "bf16", half, key)
    optimizer = str(config.get("optimizer.name") or "AdamW")
    fused = config.get("optimizer.implementation") in (None, "fused") and config.get("optimizer.fused") is not False
    if optimizer == "AdamW" and fused:
        config.set("optimizer", "adamw-fused", config.stated("optimizer.name"))
    else:
        config.optimizer(optimizer, "optimizer.name")
    if config.get("optimizer.early_step_in_backward") is True:
        config.set("optimizer_in_backward", True, "optimizer.early_step_in_backward")
    mode = str(config.get("activation_checkpoint.mode") or "selective")
    some = str(config.get("activation_checkpoint.selective_ac_option") or "2")
    how = {"full": "full", "selective": "selective" if some == "op" else f"every-{some}"}.get(mode)
    if how is not None:
        config.set("gradient_checkpointing", how, config.stated("activation_checkpoint.mode"))
    elif mode != "none":
        config.left_out["activation_checkpoint.mode"] = f"{mode}; here no activations are recomputed"
    if config.get("compile.enable", "training.compile") is True:
        config.set("compile", "layers", config.key_of("compile.enable", "training.compile"))
    config.leave_out(_LEFT_OUT)
