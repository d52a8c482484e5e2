"""torchao's tables of optimizers; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB
from benchmarks.measured.case import ALLOCATED, Case, read_rows

UNITS = {"GiB": GIB, "GB": 10**9}


def cases() -> list[Case]:
    """All rows."""
    found = []
    for row in read_rows(Path(__file__).parent):
        full_bf16, compiled, checkpointing = (
            row["precision"] == "bf16",
            row["compiled"] == "yes",
            row["checkpointing"] == "yes",
        )
        options = {
            "full_bf16": full_bf16,
            "compiled": compiled,
            "checkpointing": checkpointing,
            "optimizer": row["optimizer"],
            "offload": row["offload"],
        }
        if row["offload"]:
            technique = "optimizer offload"
        elif "bit" in row["optimizer"] or "FP8" in row["optimizer"]:
            technique = "low-bit optimizer"
        else:
            technique = "checkpointing" if checkpointing else "compile" if compiled else "eager"
        words = [
            row["model"].partition(".")[0],
            row["precision"],
            "compiled" if compiled else "eager",
            row["optimizer"],
        ]
        found.append(
            Case(
                name=", ".join([*words, *([f"{row['offload']} offloaded"] if row["offload"] else [])]),
                technique=technique,
                gpu="RTX 4070 Ti SUPER",
                statistic=ALLOCATED,
                published_bytes=int(float(row["peak_allocated"]) * UNITS[row["unit"]])
                if row["peak_allocated"]
                else None,
                workload=WorkloadSpec("benchmarks.measured.torchao.model:build", {"model": row["model"], **options}),
                step=StepConfig(precision="fp32" if full_bf16 else "bf16-mixed"),
                batch_size=int(row["batch_size"]),
                seq_len=None,
            )
        )
    return found
