"""fms-acceleration's rows without an acceleration framework, on one GPU; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import ALLOCATED, Case, read_rows

# Tokens of a sample: what the rows' tokens per second are to their samples per second.
TOKENS = {"bigcode/gpt_bigcode-santacoder": 2048, "mistralai/Mistral-7B-v0.1": 4096, "ibm/PowerLM-3b": 4096}

NOTES = {
    (
        "bigcode/gpt_bigcode-santacoder",
        8,
    ): "at the loss; a fourth bf16 tensor of the logits' size must have been alive, "
    "which was not found; at batch size 4 the optimizer's step is the peak"
}
"""What is known of rows that are off."""


def cases() -> list[Case]:
    """The rows that have a figure."""
    found = []
    for row in read_rows(Path(__file__).parent):
        if row["mem_peak_torch_mem_alloc_in_bytes"]:
            model, lora = row["model_name_or_path"], row["peft_method"] == "lora"
            batch_size = int(row["per_device_train_batch_size"])
            found.append(
                Case(
                    name=f"{model} {'LoRA' if lora else 'full'} {batch_size}",
                    technique="LoRA" if lora else "checkpointing",
                    gpu="A100 80GB",
                    statistic=ALLOCATED,
                    published_bytes=int(row["mem_peak_torch_mem_alloc_in_bytes"]),
                    workload=WorkloadSpec("benchmarks.measured.fms.model:build", {"model": model, "lora": lora}),
                    step=StepConfig(),  # its types are those it was built with
                    batch_size=batch_size,
                    seq_len=TOKENS[model],
                    note="" if lora else NOTES.get((model, batch_size), ""),
                )
            )
    return found
