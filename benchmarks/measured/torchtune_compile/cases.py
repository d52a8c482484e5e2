"""torchtune's rows before and after `compile=True`; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB
from benchmarks.measured.case import ALLOCATED, Case, read_rows

_FACTORIES = {"+ Packed Dataset": "eager", "+ Compile": "compiled"}


def cases() -> list[Case]:
    """Both rows."""
    return [
        Case(
            name=row["technique"],
            technique=_FACTORIES[row["technique"]].removesuffix("d"),
            gpu="A100 80GB",
            statistic=ALLOCATED,
            published_bytes=round(float(row["peak_active_gib"]) * GIB),
            workload=WorkloadSpec(f"benchmarks.measured.torchtune_compile.model:{_FACTORIES[row['technique']]}"),
            step=StepConfig(precision="bf16-true"),
            batch_size=2,
            seq_len=4096,
        )
        for row in read_rows(Path(__file__).parent)
    ]
