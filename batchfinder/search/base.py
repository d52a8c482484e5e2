"""What every search is, the sizes it may try, the searches that need no model, and those made of another.

The last add a cap, a floor, a granularity or a margin of memory, and compose in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from batchfinder.errors import InvalidValue
from batchfinder.results import Shape, StopReason, Trial, Verdict
from batchfinder.units import format_bytes

DEFAULT_MAX_BATCH_SIZE = 1 << 20
"""The cap where none was asked for, so that a search ends even where memory never runs out."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The sizes that may be tried, in samples whatever the step. Wrappers narrow them on the way in.

    Attributes:
        min_batch_size: no smaller size is tried; when it does not run, the answer is 0.
        max_batch_size: no larger size is tried; None for `DEFAULT_MAX_BATCH_SIZE`.
        multiple_of: every size tried is a multiple of this.
        limit_bytes: a peak above this counts as a failure; None when no wrapper set one.

    Raises:
        InvalidValue: no size is left to try.
    """

    min_batch_size: int = 1
    max_batch_size: int | None = None
    multiple_of: int = 1
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.last < self.first:
            step = "" if self.multiple_of == 1 else f" and a multiple of {self.multiple_of}"
            raise InvalidValue(
                "max_batch_size",
                DEFAULT_MAX_BATCH_SIZE if self.max_batch_size is None else self.max_batch_size,
                f"at least {self.first}, the smallest size that is at least {self.min_batch_size}{step}",
            )

    @property
    def first(self) -> int:
        """The smallest size that may be tried."""
        return -(-self.min_batch_size // self.multiple_of) * self.multiple_of

    @property
    def last(self) -> int:
        """The largest size that may be tried."""
        cap = DEFAULT_MAX_BATCH_SIZE if self.max_batch_size is None else self.max_batch_size
        return cap // self.multiple_of * self.multiple_of

    def floor(self, size: int) -> int:
        """The largest size that may be tried and is at most `size`; 0 when all are larger."""
        below = min(size, self.last) // self.multiple_of * self.multiple_of
        return below if below >= self.first else 0

    def after(self, size: int) -> int:
        """The next size up from `size`; beyond `last` where `size` is the last."""
        return max(self.first, (size // self.multiple_of + 1) * self.multiple_of)


@dataclass(frozen=True, slots=True)
class Bracket:
    """The open interval still in question.

    Every size probed lies at or outside its ends. So a search that only proposes sizes inside never probes one twice,
    and answers with a size that ran, whatever the memory curve looks like.

    Attributes:
        low: the largest size that was probed and ran; 0 before any did.
        high: the smallest size that was probed and failed; None before any did.
    """

    bounds: Bounds
    low: int = 0
    high: int | None = None

    def update(self, trial: Trial) -> Bracket:
        """Narrow by a trial of a size inside."""
        return replace(self, low=trial.batch_size) if trial.fits else replace(self, high=trial.batch_size)

    def inside(self, size: int) -> int:
        """The size that may be tried, is strictly inside, and is next to `size` (below it where there is one)."""
        highest = self.bounds.last if self.high is None else self.bounds.floor(self.high - 1)
        return min(max(self.bounds.floor(size), self.bounds.after(self.low)), highest)

    def step(self) -> int:
        """The size to try when nothing is known but the bracket: twice the low end, or the middle."""
        if self.high is None:
            return self.inside(2 * self.low)
        return self.inside((self.low + self.high) // 2)

    def stop(self, tolerance: float) -> StopReason | None:
        """Why the search may end here, with `tolerance` of the failing size between the ends; None if it may not."""
        if self.low == self.bounds.last:
            return StopReason.CAP
        if self.high is None:
            return None
        if self.high == self.bounds.after(self.low):
            return StopReason.EXACT
        if self.high - self.low <= tolerance * self.high:
            return StopReason.TOLERANCE
        return None

    def result(self, tolerance: float) -> tuple[int, StopReason]:
        """The answer and why it stands; RuntimeError where the search has not ended."""
        stop = self.stop(tolerance)
        if stop is None:
            raise RuntimeError(f"asked for a result while sizes above {self.low} are still in question")
        return self.low, stop


S = TypeVar("S")


class Search(Protocol[S]):
    """Decides which size to try next; never measures.

    An implementation is a frozen record of settings, so one search can serve many shapes. `S` is its state, frozen as
    well. For any memory curve, monotone or not, an implementation keeps to this:

    - the answer is 0 or a size that was itself probed and ran;
    - no size is probed twice;
    - it ends with the next size up probed and failed, or at the cap, or (where a tolerance was asked for) with a
      failing size within the tolerance of the answer.
    """

    def init(self, shape: Shape, bounds: Bounds) -> S:
        """The state before the first probe; a wrapper narrows the bounds before it passes them on.

        Raises:
            InvalidValue: the bounds leave nothing to try.
        """
        ...

    def propose(self, state: S) -> int | None:
        """The size to probe next; None when the search has ended."""
        ...

    def update(self, state: S, trial: Trial) -> S:
        """The state after a trial of the size that was proposed, as `judge` returned it."""
        ...

    def result(self, state: S) -> tuple[int, StopReason]:
        """The answer, 0 when nothing runs, and why the search ended. Only once `propose` has returned None."""
        ...

    def judge(self, trial: Trial) -> Trial:
        """The trial as this search counts it: as the probe measured it, unless a wrapper is stricter."""
        return trial

    def should_retry(self, state: S, trial: Trial) -> bool:
        """Whether a size that failed on a real device, from this state, is tried once more before it counts."""
        return trial.measurement.verdict.is_transient


def check_tolerance(tolerance: float) -> None:
    """Refuse (InvalidValue) a tolerance outside [0, 1): 0 could be answered without a probe of the first size."""
    if not 0 <= tolerance < 1:
        raise InvalidValue("tolerance", tolerance, "a share from 0 (exact) to below 1, such as 0.01")


class _Halving(Search[Bracket]):
    """What `Doubling` and `Bisection` share: a bracket is all they know."""

    tolerance: float

    def init(self, shape: Shape, bounds: Bounds) -> Bracket:
        return Bracket(bounds)

    def update(self, state: Bracket, trial: Trial) -> Bracket:
        return state.update(trial)

    def result(self, state: Bracket) -> tuple[int, StopReason]:
        return state.result(self.tolerance)


@dataclass(frozen=True)
class Doubling(_Halving):
    """1, 2, 4, ... until a size fails, then halve the last interval. Needs no knowledge of the answer.

    Takes at most `2 * n` probes, where `n` is the number of binary digits of the answer (of the answer divided by the
    step, with `Multiples`), and one when not even the first size runs. About half of them fail;
    `Secant` needs far fewer.

    Attributes:
        tolerance: may end once a failing size is within this share of the answer; 0 for the exact maximum.

    Raises:
        InvalidValue: the tolerance is outside [0, 1).
    """

    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)

    def propose(self, state: Bracket) -> int | None:
        """The first size, then twice the last that ran, then the middle."""
        return None if state.stop(self.tolerance) else state.step()


@dataclass(frozen=True)
class Bisection(_Halving):
    """Halve an interval that is believed to hold the answer: the answer at length 512 bounds the one at 256 from below.

    The two ends only steer. Neither is taken to run or to fail until it was probed, so ends that are wrong cost probes,
    never a wrong answer: below `low` the search goes on halving, above `high` it doubles.

    Takes at most `log2(high - low) + 2` probes when the answer is in between; at most `2 * n + 2` more when it is not,
    where `n` is the number of binary digits of the larger of `high` and the answer.

    Attributes:
        low: a size believed to run; 0 when none is.
        high: a size believed to fail.
        tolerance: may end once a failing size is within this share of the answer; 0 for the exact maximum.

    Raises:
        InvalidValue: the ends are not in order, or the tolerance is outside [0, 1).
    """

    low: int
    high: int
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)
        if self.low < 0:
            raise InvalidValue("low", self.low, "a size, or 0 when none is known to run")
        if self.high <= self.low:
            raise InvalidValue("high", self.high, f"a size above low, which is {self.low}")

    def propose(self, state: Bracket) -> int | None:
        """The middle of the interval believed in; then its ends, if they were not probed yet."""
        if state.stop(self.tolerance):
            return None
        bounds = state.bounds
        low = max(bounds.floor(self.low), state.low)
        high = bounds.after(self.high - 1) if state.high is None else state.high
        if state.high is not None and low >= state.high:
            low = state.low
        if high <= state.low:
            return state.step()
        middle = bounds.floor((low + high) // 2)
        return middle if middle > low else state.inside(low)


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


def within_limits(
    search: Search[Any], max_batch_size: int | None, min_batch_size: int = 1, multiple_of: int = 1
) -> Search[Any]:
    """The same among sizes that are multiples of a number, none smaller and none larger than asked for."""
    search = Floored(Multiples(search, multiple_of), min_batch_size)
    return search if max_batch_size is None else Capped(search, max_batch_size)
