"""The largest size that trains, found without trust in any order of sizes."""

from __future__ import annotations

from collections.abc import Callable

REACH = 3


class Unsettled(Exception):
    """The time is over before the answer is certain."""


def true_maximum(trains: Callable[[int], bool], predicted: int, reach: int = REACH) -> int:
    """The largest size that trains, whatever lies between: every size within `reach` around it has been tried.

    Sizes around the prediction come first, then sizes ever further out until one side of the answer is known, then the
    middle between the two sides. Where fitting is not monotone the answer is the largest size that trains with `reach`
    failures in a row above it.

    Args:
        trains: whether a size trains; asked once for each size.
        predicted: where to begin.
        reach: how many sizes on either side of the answer to try.

    Returns:
        The size, 0 if none trains.

    Raises:
        Exception: whatever `trains` raised.
    """
    tried: dict[int, bool] = {}

    def ask(size: int) -> bool:
        if size < 1:
            return True
        if size not in tried:
            tried[size] = trains(size)
        return tried[size]

    centre = max(1, predicted)
    while True:
        for size in range(max(1, centre - reach), centre + reach + 1):
            ask(size)
        best = max((size for size, ran in tried.items() if ran), default=0)
        beyond = range(best + 1, best + reach + 1)
        if best and all(size in tried for size in beyond):
            below = range(max(1, best - reach), best)
            for size in below:
                ask(size)
            return best
        if best:  # it trains at the end of what was tried
            centre = _boundary(ask, best, upwards=True)
        else:
            centre = _boundary(ask, min(tried), upwards=False)
            if centre == 0:
                for size in range(1, reach + 1):
                    ask(size)
                if not any(tried.values()):
                    return 0


def _boundary(ask: Callable[[int], bool], start: int, upwards: bool) -> int:
    """A size that trains whose next one does not, away from `start`."""
    gap, low, high = 1, start, start
    if upwards:
        while ask(high := low + gap):
            low, gap = high, 2 * gap
    else:
        while not ask(low := max(0, high - gap)):
            high, gap = low, 2 * gap
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    return low
