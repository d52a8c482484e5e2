"""WHICH size next: a search proposes sizes and never measures.

Read in this order: `protocol` (what a search is), `bounds` and `bracket` (what it may try, what it knows), `doubling`,
`bisection`, `secant` with its `fit` (the algorithms), `wrappers` (a cap, a floor, a granularity, a headroom).
"""

from __future__ import annotations

from batchfinder.search.base import DEFAULT_MAX_BATCH_SIZE, Bounds, Bracket, Search
from batchfinder.search.bisection import Bisection, Doubling
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
