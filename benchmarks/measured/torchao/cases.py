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
        full_bf16, compiled = row["precision"] == "bf16", row["compiled"] == "yes"
        arguments = {
            "model": row["model"],
            "full_bf16": full_bf16,
            "compiled": compiled,
            "checkpointing": row["checkpointing"] == "yes",
            "optimizer": row["optimizer"],
            "offload": row["offload"],
        }
        offloaded = f", {row['offload']} offloaded" if row["offload"] else ""
        how = f"{row['precision']}, {'compiled' if compiled else 'eager'}, {row['optimizer']}{offloaded}"
        peak = row["peak_allocated"]
        found.append(
            Case(
                name=f"{row['model'].partition('.')[0]}, {how}",
                technique=_technique(row),
                gpu="RTX 4070 Ti SUPER",
                statistic=ALLOCATED,
                published_bytes=int(float(peak) * UNITS[row["unit"]]) if peak else None,
                workload=WorkloadSpec("benchmarks.measured.torchao.model:build", arguments),
                step=StepConfig(precision="fp32" if full_bf16 else "bf16-mixed"),
                batch_size=int(row["batch_size"]),
                seq_len=None,
            )
        )
    return found


def _technique(row: dict[str, str]) -> str:
    if row["offload"]:
        return "optimizer offload"
    if row["optimizer"] not in ("Adam", "AdamW (fused)"):
        return "low-bit optimizer"
    if row["checkpointing"] == "yes":
        return "checkpointing"
    return "compile" if row["compiled"] == "yes" else "eager"
