"""LitGPT's LoRA rows on one GPU; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import ALLOCATED, Case, read_rows

LONGEST = {"phi-1.5": 1044, "StableLM Alpha": 1034, "Llama 2 7B": 1304, "Llama 2 13B": 1304}
"""Tokens of the longest sample, as published beside the table. The first batch has it."""


def cases() -> list[Case]:
    """All rows. The peak is that of the first batch, before there is a gradient or a state of AdamW."""
    found = []
    for row in read_rows(Path(__file__).parent):
        model, quantization = row["model"], row["quantization"].removeprefix("bnb.")
        arguments = {"model": model} if quantization == "None" else {"model": model, "quantization": quantization}
        figure = row["max_gpu_ram_gb"]
        found.append(
            Case(
                name=f"{model} {quantization} {row['micro_batch_size']}",
                technique="LoRA" if quantization == "None" else "QLoRA",
                gpu="A100 40GB",
                statistic=ALLOCATED,
                published_bytes=None if figure == "OOM" else round(float(figure) * 1e9),
                workload=WorkloadSpec("benchmarks.measured.litgpt.model:build", arguments),
                step=StepConfig(steps=1),  # its types are those it was built with
                batch_size=int(row["micro_batch_size"]),
                seq_len=LONGEST[model],
            )
        )
    return found
