"""What an estimate found, in words and figures: all that its tables, its JSON and its picture are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchfinder.estimate.estimate import Estimate
from batchfinder.estimate.modules import ModuleBytes, module_tree

SCHEMA = 1


@dataclass(frozen=True)
class Changed:
    """What one change of the options would buy.

    Attributes:
        change: the options to add or change, as they are typed; empty for none.
        batch_size: what `peak_bytes` and `fits` are for: the batch asked for, or a micro-batch of it.
        peak_bytes: the process's whole memory at that size; None where the change cannot be made.
        fits: whether the card has it; None likewise.
        max_batch_size: the largest batch on this card; None likewise.
        error: why the change cannot be made; None where it can.
        effective_batch_size: samples per optimizer step, where the change is of these; None elsewhere.
    """

    change: str
    batch_size: int
    peak_bytes: int | None = None
    fits: bool | None = None
    max_batch_size: int | None = None
    error: str | None = None
    effective_batch_size: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "change": self.change,
            "batch_size": self.batch_size,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "max_batch_size": self.max_batch_size,
            "error": self.error,
            "effective_batch_size": self.effective_batch_size,
        }


@dataclass(frozen=True)
class EstimateFindings:
    """One size of one model on one card.

    Attributes:
        model: as it was asked for.
        gpu: the card's name, with how many of it.
        num_gpus: how many train side by side.
        mode: `train`, `forward` or `inference`.
        precision: its name.
        optimizer: its name, or `its own`.
        attention: its name, or `default` for the model's own.
        gradient_checkpointing: whether activations are recomputed.
        accumulation: micro-batches per optimizer step.
        estimate: on one GPU that trains alone.
        strategies: on each of several GPUs, by what they do together.
        advice: what changes would buy; None where none were tried.
        by_module: whether each module is shown in the tables.
        unmodelled: what the figures leave out.
    """

    model: str
    gpu: str
    num_gpus: int
    mode: str
    precision: str
    optimizer: str
    attention: str
    gradient_checkpointing: bool
    accumulation: int
    estimate: Estimate
    strategies: Mapping[str, Estimate] = field(default_factory=dict)
    advice: tuple[Changed, ...] | None = None
    by_module: bool = False
    unmodelled: tuple[str, ...] = ()

    @property
    def modules(self) -> ModuleBytes:
        """What is alive at the peak, by module."""
        return module_tree(self.estimate.trace, self.estimate.alive)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; the figures at the top are those of one GPU that trains alone."""
        found = self.estimate
        last = found.last_segment
        return {
            "schema": SCHEMA,
            "model": self.model,
            "batch_size": found.trace.batch_size,
            "seq_len": found.trace.seq_len,
            "gpu": self.gpu,
            "num_gpus": self.num_gpus,
            "mode": self.mode,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "attention": self.attention,
            "gradient_checkpointing": self.gradient_checkpointing,
            "accumulation": self.accumulation,
            **found.to_json(),
            "peak": None if found.peak is None else found.peak.to_json(),
            "last_segment": None if last is None else last.to_json(),
            "num_alloc_retries": found.num_alloc_retries,
            "oom": None if found.oom is None else found.oom.message,
            "largest": [tensor.to_json() for tensor in found.largest()],
            "modules": self.modules.to_json(),
            "strategies": [{"strategy": name, **one.to_json()} for name, one in self.strategies.items()],
            "advice": None if self.advice is None else [changed.to_json() for changed in self.advice],
            "unmodelled": list(self.unmodelled),
        }
