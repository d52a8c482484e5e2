"""OpenTau's ladders under DeepSpeed's ZeRO-2 and ZeRO-3; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.measured.case import ALLOCATED, Case, read_rows

_LAST = {"zero2": ("27", "28"), "zero3": ("128", "160")}  # that fit, and the first that did not
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
                bracket=row["strategy"] if row["micro_batch"] in _LAST[row["strategy"]] else "",
            )
        )
    return found


NUM_PARAMETERS = 34_250_000_000
"""Of the policy, as `model.py` builds it."""


def others() -> dict[str, list[dict[str, Any]]]:
    """What DeepSpeed's estimator says of the ZeRO-2 rows, as rows for `scores.of_rows`.

    It counts every parameter of a model as one that trains, and no activations: 2 bytes each, and 18 each over the
    GPUs. Source: `estimate_zero2_model_states_mem_needs` without offloading, in
    https://github.com/deepspeedai/DeepSpeed/blob/v0.19.5/deepspeed/runtime/zero/stage_1_and_2.py.
    """
    predicted = 2 * NUM_PARAMETERS + 18 * NUM_PARAMETERS // 8
    answers = []
    for case in cases():
        if case.technique == "zero2":
            answer: dict[str, Any] = {
                "name": case.name,
                "published_bytes": case.published_bytes,
                "predicted_bytes": None,  # over 80 GB
            }
            if case.published_bytes is not None:
                answer |= {"predicted_bytes": predicted, "error": predicted / case.published_bytes - 1}
            answers.append(answer)
    return {"DeepSpeed's estimator": answers}
