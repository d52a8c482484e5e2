"""Which size to try next: a search proposes sizes and never measures.

`base` says what a search is, what it may try and what it knows; `bisection` and `secant` (with `peak_model`) are the
algorithms; `wrappers` adds a cap, a floor, a granularity or a headroom to any of them.
"""

from __future__ import annotations

from batchfinder.search.base import DEFAULT_MAX_BATCH_SIZE, Bisection, Bounds, Bracket, Doubling, Search
from batchfinder.search.secant import Secant
from batchfinder.search.wrappers import Capped, Floored, Headroom, Multiples, Wrapper

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
    "Search",
    "Secant",
    "Wrapper",
]
