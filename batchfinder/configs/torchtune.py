"""torchtune's YAML: https://github.com/pytorch/torchtune/tree/main/recipes/configs."""

from __future__ import annotations

from pathlib import Path

from batchfinder.configs.record import TrainingConfig

TOOL = "torchtune"
_LAYERS = {"output_proj": "o_proj"}  # what transformers calls them
_MLP = ("gate_proj", "up_proj", "down_proj")
_OPTIMIZERS = {"bitsandbytes.optim.PagedAdamW": "paged-adamw-8bit", "torchao.optim.AdamW8bit": "adamw-8bit"}
_LEFT_OUT = {
    "enable_activation_offloading": "activations in the CPU's memory; here on the GPU",
    "fsdp_cpu_offload": "parameters in the CPU's memory; here on the GPU",
    "tensor_parallel_dim": "layers split over GPUs: --strategy fsdp2-tp",
    "context_parallel_dim": "sequences split over GPUs: --strategy fsdp2-cp",
    "ac_mode": "checkpointing of some layers: --gradient-checkpointing every-2",
    "enable_fp8_training": "matrix products in fp8; here in bf16",
}


def read(config: TrainingConfig, folder: Path) -> None:
    """Everything but the number of GPUs, which `tune run` is told."""
    component = str(config.get("model._component_"))
    builder = component.rpartition(".")[2]
    adapter, _, name = builder.partition("_")
    with_adapters = adapter in ("lora", "qlora", "dora")
    name = (name if with_adapters else builder).removesuffix("_instruct").removesuffix("_base")
    checkpoint = str(config.get("checkpointer.checkpoint_dir") or "")
    if checkpoint and (Path(checkpoint) / "config.json").is_file():
        config.set("model", checkpoint, "checkpointer.checkpoint_dir")
    else:
        config.model(("model._component_", name), ("checkpointer.checkpoint_dir", Path(checkpoint).name))
    config.seq_len("tokenizer.max_seq_len")
    config.micro_batch = config.size("batch_size")
    config.accumulation = config.size("gradient_accumulation_steps", 1)
    if with_adapters:
        attention = config.get("model.lora_attn_modules")
        layers = [_LAYERS.get(str(each), str(each)) for each in attention] if isinstance(attention, list) else []
        layers += _MLP if config.get("model.apply_lora_to_mlp") is True else ()
        layers += ["lm_head"] if config.get("model.apply_lora_to_output") is True else []
        config.lora(config.get("model.lora_rank") or 8, "model.lora_rank", layers, "model.lora_attn_modules")
        if adapter == "dora" or config.get("model.use_dora") is True:
            config.left_out["model.use_dora"] = "DoRA; here plain LoRA"
    if adapter == "qlora" or config.get("model.quantize_base") is True:
        config.set("quantization", "nf4-double", "model._component_")  # torchao's NF4 has nested scales
    bf16 = config.get("dtype") in ("bf16", "bfloat16")
    config.precision("bf16" if bf16 else None, bf16, config.stated("dtype"))
    optimizer = str(config.get("optimizer._component_") or "torch.optim.AdamW")
    if optimizer.endswith("optim.AdamW") and config.get("optimizer.fused") is True:
        config.set("optimizer", "adamw-fused", "optimizer.fused")
    else:
        config.optimizer(optimizer, "optimizer._component_", _OPTIMIZERS)
    if config.get("optimizer_in_bwd") is True:
        config.set("optimizer_in_backward", True, "optimizer_in_bwd")
    if config.get("enable_activation_checkpointing") is True:
        config.set("gradient_checkpointing", "full", "enable_activation_checkpointing")
    if config.get("compile") is True:
        config.set("compile", "layers", "compile")
    if str(config.get("loss._component_")).rpartition(".")[2] in ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss"):
        config.set("loss", "chunked", "loss._component_")
    config.leave_out(_LEFT_OUT)
