"""What a search by real steps is asked for: options that the callback, the Trainer and a loop of one's own share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from batchfinder.cache import Store
from batchfinder.errors import InvalidValue
from batchfinder.measure.tuner import SearchLimits
from batchfinder.units import parse_budget, parse_headroom

Cache = str | os.PathLike[str] | Store | bool | None
"""Where results are cached: a path, an fsspec URL, or a `Store`; None or True for the default place, False for none."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The options as a user has given them; `limits`, `budget_bytes` and `store` have them in one form.

    Attributes:
        target_batch_size: samples per optimizer step, made up of micro-batches that fit; None for no target.
        goal: `memory` for the largest size that fits, or `throughput` for the smallest up to it at full speed.
        exact: whether the target is met exactly.
        headroom: memory to leave free: a share of what training could take (0.05 or `5%`), or bytes (an int or `1GiB`).
        min_batch_size, max_batch_size: no smaller and no larger size is tried.
        multiple_of: every size tried is a multiple of this.
        tolerance: share of the answer that may be left on the table.
        budget: the most memory that may be used, in bytes or as `12GiB`.
        cache: see `Cache`.
        certify: whether a cached answer is tried once before it is used.

    Raises:
        InvalidValue: names the option and what it may be.
    """

    target_batch_size: int | None = None
    goal: str = "memory"
    exact: bool = False
    headroom: float | int | str = 0.0
    min_batch_size: int = 1
    max_batch_size: int | None = None
    multiple_of: int = 1
    tolerance: float = 0.01
    budget: int | str | None = None
    cache: Cache = None
    certify: bool = True

    def __post_init__(self) -> None:
        for name in ("exact", "certify"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValue(name, getattr(self, name), "True or False")
        self.limits().bounds  # noqa: B018  there are sizes to try
        self.budget_bytes  # noqa: B018

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes."""
        return None if self.budget is None else parse_budget(self.budget)

    @property
    def store(self) -> Store | None:
        """The cache."""
        return store_of(self.cache)

    def limits(self, **differing: Any) -> SearchLimits:
        """What bounds a search; `differing` is what a trainer, a stage or its data add to it."""
        return SearchLimits(
            **{
                "max_batch_size": self.max_batch_size,
                "tolerance": self.tolerance,
                "headroom": parse_headroom(self.headroom),
                "min_batch_size": self.min_batch_size,
                "multiple_of": self.multiple_of,
                "target_batch_size": self.target_batch_size,
                "goal": self.goal,
                "exact": self.exact,
                "certify": self.certify,
                **differing,
            }
        )


def store_of(cache: Cache) -> Store | None:
    """The store that was asked for."""
    if cache is False:
        return None
    if isinstance(cache, Store):
        return cache
    return Store(None if cache is True else cache)
