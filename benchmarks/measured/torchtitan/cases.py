"""torchtitan's rows without and with `torch.compile`; README.md says what is compared."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB
from benchmarks.measured.case import RESERVED, Case, read_rows

_MODEL = "benchmarks.measured.torchtitan.model"
_DIFFERENCE = "what a rank holds, on one GPU, without the weights that are gathered: the rows' difference is compared"


def cases() -> list[Case]:
    """The first eager row and the compiled one as what a rank holds; then a rank of each eager row."""
    rows = {(row["technique"], int(row["gpus"])): row["memory_gib"] for row in read_rows(Path(__file__).parent)}

    def case(technique: str, gpus: int, factory: str, step: StepConfig, what: str, note: str = "") -> Case:
        return Case(
            name=f"{technique}, {gpus} GPUs{note and ', as on one'}",
            technique=what,
            gpu="H200",
            statistic=RESERVED,
            published_bytes=round(float(rows[technique, gpus]) * GIB),
            workload=WorkloadSpec(f"{_MODEL}:{factory}"),
            step=step,
            batch_size=2,
            seq_len=8192,
            note=note,
        )

    alone = StepConfig(precision="bf16-true", flash=True)
    return [
        case("FSDP", 8, "alone", alone, "checkpointing", _DIFFERENCE),
        case("FSDP + torch.compile", 8, "compiled", alone, "compile", _DIFFERENCE),
        *(case("FSDP", gpus, "eager", StepConfig(flash=True, gpus=gpus), "FSDP2") for gpus in (8, 128)),
    ]
