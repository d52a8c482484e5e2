"""What batches may be made of, beside lists and dicts."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """A batch by position and name."""

    one: Any
    two: Any


@dataclasses.dataclass(frozen=True)
class Record:
    """A batch by field."""

    one: Any
    two: Any = 0
