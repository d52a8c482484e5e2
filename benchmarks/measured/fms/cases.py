"""fms-acceleration's rows of one GPU, and of full fine-tuning on 2 and 4; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import ALLOCATED, Case, read_rows

# Tokens of a sample: what the rows' tokens per second are to their samples per second.
TOKENS = {
    "bigcode/gpt_bigcode-santacoder": 2048,
    "mistralai/Mistral-7B-v0.1": 4096,
    "ibm/PowerLM-3b": 4096,
    "meta-llama/Meta-Llama-3-8B": 4096,
}

IN_USE = 81213 << 20
"""What nvidia-smi saw in use in a run on several GPUs: cards had that much, 163 MiB more than newer drivers leave."""


def cases() -> list[Case]:
    """The rows that have a figure."""
    found = []
    for row in read_rows(Path(__file__).parent):
        if row["mem_peak_torch_mem_alloc_in_bytes"]:
            model, lora = row["model_name_or_path"], row["peft_method"] == "lora"
            batch_size = int(row["per_device_train_batch_size"])
            gpus, kernels, mixed = int(row["num_gpus"]), row["framework_config"], row["bf16"] == "True"
            on = f", {gpus} GPUs, {kernels}, {'bf16 mixed' if mixed else 'bf16'}" if gpus > 1 else ""
            technique = "FSDP" if gpus > 1 else "LoRA" if lora else "checkpointing"
            made = {"kernels": kernels, "mixed": mixed} if gpus > 1 else {}
            found.append(
                Case(
                    name=f"{model} {'LoRA' if lora else 'full'} {batch_size}{on}",
                    technique=technique,
                    gpu="A100 80GB",
                    statistic=ALLOCATED,
                    published_bytes=int(float(row["mem_peak_torch_mem_alloc_in_bytes"])),
                    workload=WorkloadSpec(
                        "benchmarks.measured.fms.model:build", {"model": model, "lora": lora, **made}
                    ),
                    # Without autocast the types are those it was built with.
                    step=StepConfig(
                        precision="bf16-mixed" if mixed else "fp32",
                        gpus=gpus,
                        flash=mixed,
                        strategy="fsdp" if gpus > 1 else None,
                    ),
                    batch_size=batch_size,
                    seq_len=TOKENS[model],
                    total_bytes=IN_USE,
                )
            )
    return found
