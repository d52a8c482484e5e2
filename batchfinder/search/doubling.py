"""1, 2, 4, ... until one fails, then halve the last interval."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.outcome import Shape, Stop, Trial
from batchfinder.search.bounds import Bounds
from batchfinder.search.bracket import Bracket
from batchfinder.search.protocol import Search, check_tolerance


@dataclass(frozen=True)
class Doubling(Search[Bracket]):
    """Needs nothing to be known: doubling brackets the answer, bisection certifies it.

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

    def result(self, state: Bracket) -> tuple[int, Stop]:
        """The bracket's low end."""
        return state.result(self.tolerance)
