"""Searches without a model: doubling then bisection, and bisection of an interval believed to hold the answer."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.errors import InvalidValue
from batchfinder.results import Shape, StopReason, Trial
from batchfinder.search.base import Bounds, Bracket, Search, check_tolerance


@dataclass(frozen=True)
class Doubling(Search[Bracket]):
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

    def init(self, shape: Shape, bounds: Bounds) -> Bracket:
        """Nothing is known yet."""
        return Bracket(bounds)

    def propose(self, state: Bracket) -> int | None:
        """The first size, then twice the last that ran, then the middle."""
        return None if state.stop(self.tolerance) else state.step()

    def update(self, state: Bracket, trial: Trial) -> Bracket:
        """Narrow the bracket."""
        return state.update(trial)

    def result(self, state: Bracket) -> tuple[int, StopReason]:
        """The bracket's low end."""
        return state.result(self.tolerance)


@dataclass(frozen=True)
class Bisection(Search[Bracket]):
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

    def init(self, shape: Shape, bounds: Bounds) -> Bracket:
        """Nothing is known yet; the two ends are beliefs."""
        return Bracket(bounds)

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

    def update(self, state: Bracket, trial: Trial) -> Bracket:
        """Narrow the bracket."""
        return state.update(trial)

    def result(self, state: Bracket) -> tuple[int, StopReason]:
        """The bracket's low end."""
        return state.result(self.tolerance)
