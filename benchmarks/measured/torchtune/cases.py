"""torchtune's levers on Llama 3.2 3B; README.md says what was read where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB
from benchmarks.measured.case import ALLOCATED, Case, read_rows

HERE = Path(__file__).parent

_CHUNKED = {"compiled": True, "chunked": True}
_CHECKPOINTED = {**_CHUNKED, "checkpointing": True}
_OFFLOADED = {**_CHECKPOINTED, "offload": True}
_LEVERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "+ Packed Dataset": ("eager", {}, {}),
    "+ Compile": ("compile", {"compiled": True}, {}),
    "+ Chunked Cross Entropy": ("compile", _CHUNKED, {}),
    "+ Activation Checkpointing": ("checkpointing", _CHECKPOINTED, {}),
    "+ Fuse optimizer step into backward": ("optimizer in backward", _CHECKPOINTED, {"optimizer_in_backward": True}),
    "+ Activation Offloading": ("offloading", _OFFLOADED, {"optimizer_in_backward": True}),
    "+ 8-bit AdamW": ("8-bit AdamW", {**_OFFLOADED, "adamw_8bit": True}, {"optimizer_in_backward": True}),
    "LoRA": ("LoRA", {**_OFFLOADED, "lora": True}, {}),
    "QLoRA": ("QLoRA", {**_OFFLOADED, "lora": True, "quantized": True}, {}),
}
_NOTES = {
    "+ 8-bit AdamW": "published: the peak is in the embedding's update, as Inductor of 2024 compiled it",
    "LoRA": "too large by as much as Adam's states of the adapters take; not known",
    "QLoRA": "too large by as much as Adam's states of the adapters take; not known",
}


def cases() -> list[Case]:
    """The rows of `_LEVERS` in both tables: all but the first of each, whose lengths were not published."""
    found = []
    for row in read_rows(HERE):
        if row["technique"] in _LEVERS:
            technique, levers, step = _LEVERS[row["technique"]]
            found.append(
                Case(
                    name=f"{row['technique']}, {row['batch_size']} x {row['seq_len']}",
                    technique=technique,
                    gpu="A100 80GB",
                    statistic=ALLOCATED,
                    published_bytes=int(float(row["peak_active_gib"]) * GIB),
                    workload=WorkloadSpec("benchmarks.measured.torchtune.model:build", levers),
                    step=StepConfig(precision="fp32", **{"optimizer": "adamw-fused", **step}),  # all is bf16 as built
                    batch_size=int(row["batch_size"]),
                    seq_len=int(row["seq_len"]),
                    note=_NOTES.get(row["technique"], ""),
                )
            )
    return found
