"""How a workload is named, so that another process can build it. Nothing here imports torch.

What is asked of the recording process, as values that pass through JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class WorkloadSpec:
    """How to build a workload in another process.

    Attributes:
        builder: `module:function`, which returns a `Workload`.
        arguments: its keyword arguments, as JSON values.
        fingerprint: `module:function` that makes a text of a workload, by which the cache knows it; empty for none.
    """

    builder: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


@dataclass(frozen=True)
class RecordingJob:
    """One recording.

    Attributes:
        settings: the fields of a `StepSettings`.
        capability: the simulated GPU's compute capability.
        batch_size: samples in a micro-batch.
        seq_len: tokens per sample; None for data of one fixed shape.
        flash: whether attention must run as the flash kernel.
        workload: another workload than the one the process was opened with, built for this recording alone: its
            libraries are imported by then.
    """

    settings: dict[str, Any]
    capability: tuple[int, int]
    batch_size: int
    seq_len: int | None
    flash: bool = False
    workload: WorkloadSpec | None = None

    def __str__(self) -> str:
        size = f"batch size {self.batch_size}"
        return size if self.seq_len is None else f"{size}, sequence length {self.seq_len}"

    def to_json(self) -> dict[str, Any]:
        """The job as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class WorkloadFacts:
    """What the recording process tells about a workload that it has built.

    Attributes:
        fingerprint: of all in the workload that changes the memory it takes.
        max_seq_len: the longest sequence its positions allow; None where there is no limit.
        seq_len_unit: what a sequence length counts.
        brings_optimizer: whether it has an optimizer of its own.
        versions: of the libraries that took part.
    """

    fingerprint: str
    max_seq_len: int | None
    seq_len_unit: str
    brings_optimizer: bool
    versions: dict[str, str]
