"""One line of a sweep, as values and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchfinder.accumulation import AccumulationPlan
from batchfinder.units import format_bytes

SCHEMA = 1


@dataclass(frozen=True)
class SweepRow:
    """The largest batch of one (model, GPU, sequence length).

    Attributes:
        model: as it was asked for.
        seq_len: tokens per sample; None for data of one fixed shape.
        gpu: the device's name.
        budget_bytes: what the allocator may take of it.
        mode: `train`, `forward` or `inference`.
        precision: `fp32`, `bf16-mixed`, `16-mixed` or `bf16-true`.
        optimizer: its name.
        attention: `eager`, `sdpa` or `flash`.
        gradient_checkpointing: whether activations are recomputed.
        max_batch_size: 0 when not even one sample fits.
        peak_allocated_bytes: at that size; None when it is 0.
        peak_reserved_bytes: at that size; None when it is 0.
        source: `simulated`, `measured` or `cache`.
        trials: sizes probed.
        seconds: spent on this row.
        unmodelled: what a simulated figure leaves out.
        needed_bytes: what one sample would take, when the answer is 0.
        published: the published figure, where there is one.
        plan: how to reach the target effective batch, where one was asked for and something fits.
    """

    model: str
    seq_len: int | None
    gpu: str
    budget_bytes: int
    mode: str
    precision: str
    optimizer: str
    attention: str
    gradient_checkpointing: bool
    max_batch_size: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    source: str
    trials: int
    seconds: float
    unmodelled: tuple[str, ...] = ()
    needed_bytes: int | None = None
    published: int | None = None
    plan: AccumulationPlan | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        row = {
            "model": self.model,
            "seq_len": self.seq_len,
            "gpu": self.gpu,
            "budget_bytes": self.budget_bytes,
            "mode": self.mode,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "attention": self.attention,
            "gradient_checkpointing": self.gradient_checkpointing,
            "max_batch_size": self.max_batch_size,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "source": self.source,
            "trials": self.trials,
            "seconds": round(self.seconds, 3),
            "unmodelled": list(self.unmodelled),
            "needed_bytes": self.needed_bytes,
            "published": self.published,
        }
        if self.plan is not None:
            row["micro_batch_size"] = self.plan.micro_batch_size
            row["accumulation"] = self.plan.accumulation
            row["effective_batch_size"] = self.plan.effective_batch_size
        return row


Columns = dict[str, list[str]]


def columns(rows: list[SweepRow], target_batch_size: int | None) -> Columns:
    """The rows as columns of text; those with nothing to say are left out.

    Args:
        rows: in the order in which they are to be shown.
        target_batch_size: the effective batch that was asked for; None without one.
    """
    table: Columns = {
        "model": [row.model for row in rows],
        "GPU": [row.gpu for row in rows],
        "seq len": ["-" if row.seq_len is None else str(row.seq_len) for row in rows],
        "max batch": [str(row.max_batch_size) for row in rows],
    }
    if any(row.published is not None for row in rows):
        table["published"] = ["" if row.published is None else str(row.published) for row in rows]
    table["peak reserved"] = [_peak(row) for row in rows]
    table["usable"] = [format_bytes(row.budget_bytes) for row in rows]
    if target_batch_size is not None:
        table[f"for {target_batch_size}: micro x accumulation"] = [
            "does not fit" if row.plan is None else str(row.plan) for row in rows
        ]
    table["source"] = ["simulated (cache)" if row.source == "cache" else row.source for row in rows]
    return table


def _peak(row: SweepRow) -> str:
    if row.peak_reserved_bytes is not None:
        return format_bytes(row.peak_reserved_bytes)
    return "-" if row.needed_bytes is None else f"1 needs {format_bytes(row.needed_bytes)}"
