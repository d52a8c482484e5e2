"""OpenTau's ladders under DeepSpeed's ZeRO-2 and ZeRO-3; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import ALLOCATED, Case, read_rows

_MODEL = "benchmarks.measured.opentau.model"
_STEPS = {
    "zero2": ("replicated", StepConfig(gpus=8, strategy="zero2", precision="bf16-mixed")),
    "zero3": ("sharded", StepConfig(gpus=8)),
}


def cases() -> list[Case]:
    """All rows, those that ran out of memory too."""
    found = []
    for row in read_rows(Path(__file__).parent):
        builder, step = _STEPS[row["strategy"]]
        found.append(
            Case(
                name=f"{row['strategy']} {row['micro_batch']}",
                technique=row["strategy"],
                gpu="A100 80GB",
                statistic=ALLOCATED,
                published_bytes=round(float(row["peak_GB"]) * 1e9) if row["peak_GB"] else None,
                workload=WorkloadSpec(f"{_MODEL}:{builder}"),
                step=step,
                batch_size=int(row["micro_batch"]),
                seq_len=None,
            )
        )
    return found
