"""What is asked of the recording process, as values that pass through JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from batchfinder.step.spec import WorkloadSpec


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
