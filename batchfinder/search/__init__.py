"""Which size to try next: a search proposes sizes and never measures.

`base` says what a search is, has those that need no model, and adds a cap, a floor, a granularity or a headroom to any
of them; `secant` fits a line to the peaks that were measured.
"""

from __future__ import annotations

from batchfinder.search.base import (
    DEFAULT_MAX_BATCH_SIZE,
    Bisection,
    Bounds,
    Bracket,
    Capped,
    Doubling,
    Floored,
    Headroom,
    Multiples,
    Search,
    Wrapper,
    within_limits,
)
from batchfinder.search.secant import Prediction, Secant

__all__ = [
    "DEFAULT_MAX_BATCH_SIZE",
    "Bisection",
    "Bounds",
    "Bracket",
    "Capped",
    "Doubling",
    "Floored",
    "Headroom",
    "Multiples",
    "Prediction",
    "Search",
    "Secant",
    "Wrapper",
    "within_limits",
]
