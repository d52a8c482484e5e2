"""What every search is: settings that never change, a state that is passed along, four steps and a judgement."""

from __future__ import annotations

from typing import Protocol, TypeVar

from batchfinder.errors import InvalidValue
from batchfinder.outcome import Shape, Stop, Trial
from batchfinder.search.bounds import Bounds

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
        """The state before the first probe.

        Args:
            shape: the sample's shape.
            bounds: the sizes that may be tried; a wrapper narrows them before it passes them on.

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

    def result(self, state: S) -> tuple[int, Stop]:
        """The answer, 0 when nothing runs, and why the search ended. Only once `propose` has returned None."""
        ...

    def judge(self, trial: Trial) -> Trial:
        """The trial as this search counts it. What a probe says is taken as it is unless a wrapper is stricter."""
        return trial

    def doubts(self, state: S, trial: Trial) -> bool:
        """Whether a size that failed on a real device is to be tried once more before that is believed.

        Args:
            state: before the trial.
            trial: as `judge` returned it.
        """
        return trial.measurement.verdict.may_pass


def check_tolerance(tolerance: float) -> None:
    """Refuse a tolerance outside [0, 1), under which 0 could be answered without a probe of the first size.

    Raises:
        InvalidValue: it is outside.
    """
    if not 0 <= tolerance < 1:
        raise InvalidValue("tolerance", tolerance, "a share from 0 (exact) to below 1, such as 0.01")
