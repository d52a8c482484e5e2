"""Searches made of another search: a cap, a floor, a granularity, a margin of memory. They compose in any order."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchfinder.errors import InvalidValue
from batchfinder.results import Shape, StopReason, Trial, Verdict
from batchfinder.search.base import Bounds, S, Search
from batchfinder.units import format_bytes


@dataclass(frozen=True)
class Wrapper(Search[S]):
    """Passes everything on; a wrapper of your own overrides what it changes."""

    search: Search[S]

    def init(self, shape: Shape, bounds: Bounds) -> S:
        return self.search.init(shape, bounds)

    def propose(self, state: S) -> int | None:
        return self.search.propose(state)

    def update(self, state: S, trial: Trial) -> S:
        return self.search.update(state, trial)

    def result(self, state: S) -> tuple[int, StopReason]:
        return self.search.result(state)

    def judge(self, trial: Trial) -> Trial:
        return self.search.judge(trial)

    def should_retry(self, state: S, trial: Trial) -> bool:
        return self.search.should_retry(state, trial)


@dataclass(frozen=True)
class Capped(Wrapper[S]):
    """Tries nothing above a cap. The smallest cap counts; without one it is `DEFAULT_MAX_BATCH_SIZE`.

    Raises:
        InvalidValue: the cap is below 1.
    """

    max_batch_size: int

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise InvalidValue("max_batch_size", self.max_batch_size, "a size of at least 1")

    def init(self, shape: Shape, bounds: Bounds) -> S:
        cap = self.max_batch_size if bounds.max_batch_size is None else min(self.max_batch_size, bounds.max_batch_size)
        return self.search.init(shape, replace(bounds, max_batch_size=cap))


@dataclass(frozen=True)
class Floored(Wrapper[S]):
    """Tries nothing below a floor, and starts there. The largest floor counts.

    When the floor does not run the answer is 0: nothing that would have been of use runs. Smaller sizes are not tried.

    Raises:
        InvalidValue: the floor is below 1.
    """

    min_batch_size: int

    def __post_init__(self) -> None:
        if self.min_batch_size < 1:
            raise InvalidValue("min_batch_size", self.min_batch_size, "a size of at least 1")

    def init(self, shape: Shape, bounds: Bounds) -> S:
        return self.search.init(shape, replace(bounds, min_batch_size=max(self.min_batch_size, bounds.min_batch_size)))


@dataclass(frozen=True)
class Multiples(Wrapper[S]):
    """Tries multiples of a number only, such as 8 for tensor cores. Wrapped twice, multiples of both.

    Raises:
        InvalidValue: the number is below 1.
    """

    of: int

    def __post_init__(self) -> None:
        if self.of < 1:
            raise InvalidValue("multiple_of", self.of, "a size of at least 1")

    def init(self, shape: Shape, bounds: Bounds) -> S:
        return self.search.init(shape, replace(bounds, multiple_of=math.lcm(self.of, bounds.multiple_of)))


@dataclass(frozen=True)
class Headroom(Wrapper[S]):
    """Counts a size that runs but leaves too little memory free as one that failed.

    Judged by the peak reserved, or the peak allocated where that is all there is. A measurement without either is taken
    as it is: give such a probe a lower limit instead.

    Attributes:
        limit_bytes: bytes there are, counted as the probe counts its peaks.
        headroom_bytes: bytes of these to leave free.

    Raises:
        InvalidValue: the headroom is negative or leaves nothing.
    """

    limit_bytes: int
    headroom_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.headroom_bytes < self.limit_bytes:
            expected = f"from 0 bytes to less than the limit of {format_bytes(self.limit_bytes)}"
            raise InvalidValue("headroom_bytes", self.headroom_bytes, expected)

    def init(self, shape: Shape, bounds: Bounds) -> S:
        """Lower the limit a fit aims at."""
        usable = self.limit_bytes - self.headroom_bytes
        limit = usable if bounds.limit_bytes is None else min(usable, bounds.limit_bytes)
        return self.search.init(shape, replace(bounds, limit_bytes=limit))

    def judge(self, trial: Trial) -> Trial:
        """Lower the verdict of a size that leaves too little free."""
        trial = self.search.judge(trial)
        seen = trial.measurement
        peak = seen.peak_allocated_bytes if seen.peak_reserved_bytes is None else seen.peak_reserved_bytes
        if not trial.fits or peak is None or peak <= self.limit_bytes - self.headroom_bytes:
            return trial
        message = (
            f"its peak of {format_bytes(peak)} leaves {format_bytes(self.limit_bytes - peak)} "
            f"of {format_bytes(self.limit_bytes)} free; the headroom is {format_bytes(self.headroom_bytes)}"
        )
        return replace(trial, measurement=replace(seen, verdict=Verdict.HEADROOM, message=message))
