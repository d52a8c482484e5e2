"""How long each part may take, and in which order they come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

# Of the whole time, by when a part must have ended. What a part leaves over is the next one's.
ENDS = {"cells": 0.40, "traces": 0.50, "maxima": 0.78, "callback": 0.88, "tests": 1.0}


@dataclass(frozen=True)
class Clock:
    """Counts from when it is made.

    Attributes:
        seconds: for everything.
        started: when, by `time.monotonic`.
    """

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def left(self, part: str) -> float:
        """Seconds until a part must have ended; 0 or less when it is over.

        Args:
            part: a key of `ENDS`.
        """
        return self.seconds * ENDS[part] - self.passed
