"""torchtitan's rows of FSDP2, without and with `torch.compile`; README.md says what is simulated."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB
from benchmarks.measured.case import RESERVED, Case, read_rows

NOTES = {"tutorial": "too large by one tensor of the MLP's width in each block, which that day's PyTorch did not keep"}


def cases() -> list[Case]:
    """One rank of each row."""
    found = []
    for row in read_rows(Path(__file__).parent):
        how = f"{row['compiled']} compiled" if row["compiled"] else "eager"
        shape = f"{row['batch_size']} x {row['seq_len']}, {row['gpus']} GPUs"
        arguments = {name: row[name] for name in ("checkpointing", "compiled")}
        found.append(
            Case(
                name=f"{how}, checkpointing {row['checkpointing']}, {shape}",
                technique="compile" if row["compiled"] else "FSDP2",
                gpu="H200",
                statistic=RESERVED,
                published_bytes=round(float(row["memory_gib"]) * GIB),
                workload=WorkloadSpec("benchmarks.measured.torchtitan.model:build", arguments),
                step=StepConfig(flash=True, gpus=int(row["gpus"])),
                batch_size=int(row["batch_size"]),
                seq_len=int(row["seq_len"]),
                expandable_segments=row["run"] != "report",
                note=NOTES.get(row["run"], ""),
            )
        )
    return found
