"""One line of a sweep, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchfinder.accumulation import AccumulationPlan

SCHEMA = 1


@dataclass(frozen=True)
class SweepRow:
    """The largest batch of one (model, GPU, sequence length).

    Attributes:
        model: as it was asked for.
        seq_len: tokens per sample; None for data of one fixed shape.
        gpu: the device's name.
        budget_bytes: what the allocator may take of it, the headroom included.
        mode: `train`, `forward` or `inference`.
        precision: `fp32`, `bf16-mixed`, `16-mixed` or `bf16-true`.
        optimizer: its name.
        attention: `eager`, `sdpa`, `flash`, or `default` for the model's own.
        gradient_checkpointing: whether activations are recomputed.
        max_batch_size: 0 when not even one sample fits.
        peak_allocated_bytes: at that size; None when it is 0.
        peak_reserved_bytes: at that size; None when it is 0.
        source: `simulated`, `measured` or `cache`.
        found_by: `simulated` or `measured`, also where it came from the cache.
        trials: sizes probed for this row; none where it came from the cache.
        failed_trials: how many of these did not run.
        seconds: spent on this row, with the recordings that it was the first to need.
        unmodelled: what a simulated figure leaves out.
        unscaled: how many of the sizes probed were recorded themselves, not scaled; 0 for a row from the cache.
        headroom_bytes: what had to stay free of the budget.
        stop: why the search ended: `exact` (the next size failed), `tolerance` (one a little larger did) or `cap` (no
            larger one was tried).
        stopped_by: how the smallest size that failed above the answer did: `out_of_memory`, `thrashing`,
            `size_ceiling`, `host_out_of_memory`; None where none failed.
        needed_bytes: what one sample would take, when the answer is 0.
        message: the device's own words, when the answer is 0.
        published: the published figure, where there is one.
        target_batch_size: the effective batch that was asked for; None without one.
        plan: how to make it, where something fits.
        curve: (batch size, peak reserved bytes) for the picture; not part of the JSON.
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
    unscaled: int = 0
    found_by: str = "simulated"
    failed_trials: int = 0
    headroom_bytes: int = 0
    stop: str = "exact"
    stopped_by: str | None = None
    needed_bytes: int | None = None
    message: str = ""
    published: int | None = None
    target_batch_size: int | None = None
    plan: AccumulationPlan | None = None
    curve: tuple[tuple[int, int], ...] = ()

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
            "unscaled": self.unscaled,
            "stop": self.stop,
            "needed_bytes": self.needed_bytes,
            "headroom_bytes": self.headroom_bytes,
            "failed_trials": self.failed_trials,
            "stopped_by": self.stopped_by,
            "found_by": self.found_by,
            "message": self.message,
            "published": self.published,
        }
        if self.target_batch_size is not None:
            row["target_batch_size"] = self.target_batch_size
            for name in ("micro_batch_size", "accumulation", "num_devices", "effective_batch_size"):
                row[name] = getattr(self.plan, name, None)
        return row
