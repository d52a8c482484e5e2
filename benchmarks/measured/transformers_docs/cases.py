"""transformers' guide to training on one GPU; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import MIB
from benchmarks.measured.case import RESERVED, Case, read_rows

OCCUPIED_BEFORE = (1343 - 2) * MIB
"""What was printed when the first tensor was there, less its segment."""

CARD = 16160 * MIB
"""What nvidia-smi showed of the card."""


def cases() -> list[Case]:
    """All rows."""
    found = []
    for row in read_rows(Path(__file__).parent):
        checkpointing = row["checkpointing"] == "yes"
        arguments = {"optimizer": row["optimizer"], "checkpointing": checkpointing}
        found.append(
            Case(
                name=row["how"],
                technique="checkpointing" if checkpointing else "eager",
                gpu="V100 16GB",
                statistic=RESERVED,
                published_bytes=int(row["occupied_mib"]) * MIB,
                workload=WorkloadSpec("benchmarks.measured.transformers_docs.model:build", arguments),
                step=StepConfig(
                    precision="16-mixed" if row["fp16"] == "yes" else "fp32",
                    micro_batches=int(row["accumulated"]),
                ),
                batch_size=int(row["batch_size"]),
                seq_len=512,
                outside_bytes=OCCUPIED_BEFORE,
                without=("workspace",),
                total_bytes=CARD,
                context_bytes=OCCUPIED_BEFORE,
            )
        )
    return found
