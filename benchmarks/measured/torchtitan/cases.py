"""torchtitan's rows without and with `torch.compile`; README.md says what is simulated."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB
from benchmarks.measured.case import RESERVED, Case, read_rows

_FACTORIES = {"FSDP": "eager", "FSDP + torch.compile": "compiled"}


def cases() -> list[Case]:
    """One rank of each row."""
    return [
        Case(
            name=f"{row['technique']}, {row['gpus']} GPUs",
            technique="compile" if row["technique"] != "FSDP" else "FSDP2",
            gpu="H200",
            statistic=RESERVED,
            published_bytes=round(float(row["memory_gib"]) * GIB),
            workload=WorkloadSpec(f"benchmarks.measured.torchtitan.model:{_FACTORIES[row['technique']]}"),
            step=StepConfig(flash=True, gpus=int(row["gpus"])),
            batch_size=2,
            seq_len=8192,
        )
        for row in read_rows(Path(__file__).parent)
    ]
