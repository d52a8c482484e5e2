"""Wall seconds, and those of the processor: the latter hold on a machine that does other work as well."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import Any


def _processor_seconds() -> float:
    """Of this process and of all that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@dataclass
class Clock:
    """Runs from when it is made."""

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=_processor_seconds)

    def read(self) -> dict[str, float]:
        """Seconds since then."""
        return {
            "seconds": round(time.perf_counter() - self.wall, 2),
            "processor_seconds": round(_processor_seconds() - self.processor, 2),
        }


def total(readings: list[dict[str, Any]]) -> dict[str, float]:
    """The sum of several readings."""
    return {name: round(sum(each[name] for each in readings), 2) for name in ("seconds", "processor_seconds")}
