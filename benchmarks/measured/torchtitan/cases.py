"""torchtitan's rows without and with `torch.compile`; README.md says what is compared."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB
from benchmarks.measured.case import RESERVED, Case, read_rows

_FACTORIES = {"FSDP": "eager", "FSDP + torch.compile": "compiled"}


def cases() -> list[Case]:
    """Both rows."""
    return [
        Case(
            name=row["technique"],
            technique="compile" if "compile" in row["technique"] else "checkpointing",
            gpu="H200",
            statistic=RESERVED,
            published_bytes=round(float(row["memory_gib"]) * GIB),
            workload=WorkloadSpec(f"benchmarks.measured.torchtitan.model:{_FACTORIES[row['technique']]}"),
            step=StepConfig(precision="bf16-true", flash=True),
            batch_size=2,
            seq_len=8192,
            note="one of 8 FSDP ranks, without the weights that are gathered; what is compared is the rows' difference",
        )
        for row in read_rows(Path(__file__).parent)
    ]
