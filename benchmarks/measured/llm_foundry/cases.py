"""LLM Foundry's benchmarks under FSDP, which ran; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import RESERVED, Case, read_rows

_FP8 = "computed in bf16 here: Transformer Engine keeps activations of one byte, so what ran then takes less"


def cases() -> list[Case]:
    """All rows; a trial without a figure, each of which ran."""
    found = []
    for row in read_rows(Path(__file__).parent):
        checkpointed = row["Activation Checkpointing"] == "True"
        strategy, length, micro_batch = row["Sharding Strategy"], int(row["SeqLen (T)"]), int(row["MicroBatchSize"])
        size = f"{micro_batch} x {length}, accumulation {row['GradAccum']}"
        how = "checkpointing" if checkpointed else "FSDP2"
        kind = f"{row['Precision']} {row['MP Mode']} {strategy}"
        card = row["GPU"].upper().replace("_", " ")
        found.append(
            Case(
                name=", ".join((row["Model"], f"{row['# GPUs']} {card}", kind, how, size)),
                technique=how,
                gpu=card,
                statistic=RESERVED,
                published_bytes=None,
                workload=WorkloadSpec(
                    "benchmarks.measured.llm_foundry.model:build",
                    {
                        "model": row["Model"],
                        "positions": length,
                        "pure": row["MP Mode"] == "PURE",
                        "reshards": strategy == "FULL_SHARD",
                        "checkpointed": checkpointed,
                        "unpads": "Large Scale" in row["Section"],
                    },
                ),
                # In what is there at the peak, two micro-batches stand for all of them.
                step=StepConfig(flash=True, gpus=int(row["# GPUs"]), micro_batches=min(2, int(row["GradAccum"]))),
                batch_size=micro_batch,
                seq_len=length,
                note=_FP8 if row["Precision"] == "amp_fp8" else "",
                ran=True,
            )
        )
    return found
