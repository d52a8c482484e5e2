"""How a workload is named, so that another process can build it. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
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
