"""The search for real devices: predict, certify, move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from batchfinder.outcome import Shape, Stop, Trial
from batchfinder.search import Bounds, Search, Secant

FIRST_SHARE = 0.85
"""Where to start, as a share of the prediction.

At small sizes the peak is the optimizer's, which is flat, and a line from there says too much fits. A quarter of the
prediction may lie on that flat part, this share hardly ever does. Measured on made-up curves whose optimizer takes 5 %
to 60 % of the card: 5 probes and 1 failure suffice for every prediction that is 5 % too low to 2 % too high; from a
quarter, one search in five takes more.
"""

FIRST_STRIDE = 8
"""How far to go on two points, where nothing is predicted."""

BENDING = 1.05
"""While a stretch of the curve is steeper than the one before by this factor, a line through its end goes too far."""

SHARE_OF_WAY = 0.7
"""How much of the way to go that a line through a curve that still bends suggests."""


@dataclass(frozen=True, slots=True)
class FirstStepsState:
    """What the wrapped search knows, and what is needed to place the first probes.

    Attributes:
        inner: the wrapped search's state.
        bounds: the sizes that may be tried.
        points: size and peak of each probe that ran, in order.
        tries: probes so far.
    """

    inner: Any
    bounds: Bounds
    points: tuple[tuple[int, int], ...] = ()
    tries: int = 0

    @property
    def bends(self) -> bool:
        """Whether the last stretch between peaks is steeper than the one before, or there are no two stretches."""
        if len(self.points) < 3:
            return True
        (a, low), (b, middle), (c, high) = self.points[-3:]
        return (high - middle) * (b - a) > BENDING * (middle - low) * (c - b)


@dataclass(frozen=True)
class FirstSteps(Search[FirstStepsState]):
    """Places the first probes of a search that draws a line through peaks.

    Attributes:
        search: the search that is wrapped; it takes trials of sizes other than it proposed.
        predicted: a guess of the answer; None without one.
    """

    search: Search[Any]
    predicted: int | None

    def init(self, shape: Shape, bounds: Bounds) -> FirstStepsState:
        """Nothing is known yet."""
        return FirstStepsState(self.search.init(shape, bounds), bounds)

    def propose(self, state: FirstStepsState) -> int | None:
        """What the search proposes, but for the first probe of a prediction, and less far along a curve that bends."""
        size, bounds = self.search.propose(state.inner), state.bounds
        if size is None:
            return None
        if self.predicted is not None:
            return size if state.tries else max(bounds.first, bounds.floor(int(FIRST_SHARE * self.predicted)))
        climbing = len(state.points) == state.tries >= 2
        if not climbing or not state.bends:
            return size
        low = state.points[-1][0]
        stride = FIRST_STRIDE * low if state.tries == 2 else low + int(SHARE_OF_WAY * (size - low))
        return min(size, max(bounds.floor(stride), bounds.after(low)))

    def update(self, state: FirstStepsState, trial: Trial) -> FirstStepsState:
        """Pass on, and count."""
        seen = trial.measurement
        peak = seen.peak_allocated_bytes if seen.peak_reserved_bytes is None else seen.peak_reserved_bytes
        known = trial.fits and peak is not None
        return replace(
            state,
            inner=self.search.update(state.inner, trial),
            points=(*state.points, (trial.batch_size, peak or 0)) if known else state.points,
            tries=state.tries + 1,
        )

    def result(self, state: FirstStepsState) -> tuple[int, Stop]:
        """Pass on."""
        return self.search.result(state.inner)

    def judge(self, trial: Trial) -> Trial:
        """Pass on."""
        return self.search.judge(trial)


def certified_search(predicted: int | None, limit_bytes: int | None, tolerance: float = 0.01) -> Search[Any]:
    """A search whose every answer was run, in few probes and with one failure as a rule.

    Args:
        predicted: the simulated step's answer; None where the step could not be recorded.
        limit_bytes: bytes a peak may have, as the probe counts them; None when unknown.
        tolerance: largest share of the answer that may be left on the table; 0 for the exact maximum.

    Raises:
        InvalidValue: a setting is out of range.
    """
    return FirstSteps(Secant(limit_bytes=limit_bytes, tolerance=tolerance, predicted=predicted), predicted)
