"""The smallest batch size at full speed: which sizes to time, how often, and what the timings show.

Throughput rises with the batch size until the device is busy all the time, and stays there. Timings scatter and drift
(clocks, heat, other processes), so sizes are timed in rounds, each size once in a round and in a shuffled order, and
are compared within their round. Medians are taken, and errors are estimated from median absolute deviations, so that a
few timings which something else slowed down do not count.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from batchfinder.results import Rate, Throughput
from batchfinder.search.base import Bounds

NEAR_BEST = 0.97
"""Share of the best rate from which on a size counts as being at full speed."""

_OUT_OF_QUESTION = 0.85
"""Share of the best rate below which a size is not timed any more."""

_LEAST_ROUNDS, _ROUNDS, _MOST_ROUNDS = 3, 5, 15
"""After how many rounds slow sizes go, the answer may be given, and it has to be."""

_ERRORS = 2.0
"""How many standard errors a size has to be on its side of the border for the answer to be given early."""

_MOST_ERROR = 0.015
"""Standard error, as a share, above which it cannot be told: half of what `NEAR_BEST` leaves."""

_HOPELESS = 2.0
"""Multiple of that error which is given up on, where it is what all rounds together would come to."""

_MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution, in its median absolute deviations: 1 / Phi^-1(3/4)."""

_MEDIAN_TO_MEAN = math.sqrt(math.pi / 2)
"""Standard error of the median of many normal values, in that of their mean: 1.2533."""


def sizes_to_time(largest: int, bounds: Bounds) -> list[int]:
    """Sizes from the largest one that fits downwards, each about 1 / sqrt(2) of the one before, the smallest first.

    Example:
        >>> sizes_to_time(96, Bounds(multiple_of=8))
        [8, 16, 24, 32, 48, 64, 96]
    """
    sizes, exact = {largest}, float(largest)
    while exact > bounds.first:
        exact /= math.sqrt(2)
        nearest = round(exact / bounds.multiple_of) * bounds.multiple_of
        sizes.add(max(nearest, bounds.first))
    return sorted(sizes)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the rounds so far show.

    Attributes:
        ratios: log of each size's rate over the best rate.
        errors: their standard errors.
        batch_size: the smallest size at full speed.
        smaller: the sizes in play below it.
        is_largest: whether none in play is above it.
        level: log of the best rate.
    """

    ratios: Mapping[int, float]
    errors: Mapping[int, float]
    batch_size: int
    smaller: Sequence[int]
    is_largest: bool
    level: float

    @property
    def decided(self) -> bool:
        """Whether the answer and all smaller sizes are well on their sides of the border.

        The largest size is the answer where all others are below it, however well its own speed is known.
        """
        border = math.log(NEAR_BEST)
        if self.is_largest and not self.smaller:
            return self.error <= _MOST_ERROR
        above = self.is_largest or self.ratios[self.batch_size] - border >= _ERRORS * self.errors[self.batch_size]
        return above and all(border - self.ratios[size] >= _ERRORS * self.errors[size] for size in self.smaller)

    @property
    def error(self) -> float:
        """The standard error of what decides: of the answer, and of the next smaller size in play."""
        own = () if self.is_largest and self.smaller else (self.batch_size,)
        return max(self.errors[size] for size in (*own, *self.smaller[-1:]))


def compare(rates: Sequence[Mapping[int, float]], in_play: Sequence[int]) -> Comparison:
    """Compare sizes within each round.

    The best rate is the median of those sizes that cannot be told from the best one: on a plateau the maximum alone is
    the luckiest of many, and all others would seem slower than they are.

    Args:
        rates: of each round, samples per second by size; a size that is not in a round is in none after it.
        in_play: the sizes that are in every round, in ascending order.
    """
    logs = {size: [math.log(timed[size]) for timed in rates if size in timed] for size in rates[0]}

    def against(group: Sequence[int]) -> tuple[dict[int, float], dict[int, float], float]:
        """By size, the median of its speed over the group's median speed in the same round, as a logarithm, and the
        standard error of that; then the median of the standard errors.
        """
        levels = [statistics.median(logs[size][index] for size in group) for index in range(len(rates))]
        medians, deviations, counts = {}, {}, {}
        for size, values in logs.items():
            ratios = [value - level for value, level in zip(values, levels, strict=False)]
            medians[size], counts[size] = statistics.median(ratios), len(ratios)
            deviations[size] = [abs(ratio - medians[size]) for ratio in ratios]
        # The few rounds of one size say little of its scatter, so it is taken for at least that of all of them.
        known = [
            each for size in logs if [size] != group and counts[size] >= _LEAST_ROUNDS for each in deviations[size]
        ]
        pooled = statistics.median(known) if known else 0.0
        errors = {}
        for size in logs:
            # A median is nearer to the values it is made of than the truth is, the more so the fewer they are.
            scale = _MAD_TO_DEVIATION * _MEDIAN_TO_MEAN / math.sqrt(max(1, counts[size] - 1))
            errors[size] = scale * max(pooled, statistics.median(deviations[size]))
        return medians, errors, statistics.median(levels)

    centres = [statistics.median(math.log(timed[size]) for size in in_play) for timed in rates]
    typical = {
        size: statistics.median(value - centre for value, centre in zip(logs[size], centres, strict=True))
        for size in in_play
    }
    best = max(in_play, key=lambda size: typical[size])
    ratios, errors, _ = against([best])
    ratios, errors, level = against([size for size in in_play if ratios[size] >= -errors[size]])
    answer = min((size for size in in_play if ratios[size] >= math.log(NEAR_BEST)), default=best)
    smaller = [size for size in in_play if size < answer]
    return Comparison(ratios, errors, answer, smaller, answer == in_play[-1], level)


def find_full_speed(sizes: Sequence[int], rate: Callable[[int], float | None]) -> Throughput | None:
    """Time sizes until it can be told which is the smallest at full speed.

    Args:
        sizes: in ascending order; the largest is the answer where it cannot be told.
        rate: times a size once and returns its samples per second; None where it does not run, and is not timed again.

    Returns:
        None where no size runs.
    """
    rates: list[dict[int, float]] = []
    in_play, slow = list(sizes), set[int]()
    seen: Comparison | None = None
    order = random.Random(0)  # the same on every rank
    while len(rates) < _MOST_ROUNDS:
        timed: dict[int, float] = {}
        for size in order.sample(in_play, len(in_play)):
            measured = rate(size)
            if measured is not None:
                timed[size] = measured
        in_play = [size for size in in_play if size in timed]
        if not in_play:
            return None
        # A size that does not run any more has no part in what is found.
        kept = {size for size in sizes if size in timed or size in slow}
        rates = [{size: one[size] for size in one if size in kept} for one in (*rates, timed)]
        if len(rates) < _LEAST_ROUNDS:
            continue
        seen = compare(rates, in_play)
        limit = math.log(_OUT_OF_QUESTION)
        slow |= {size for size in in_play if seen.ratios[size] + _ERRORS * seen.errors[size] < limit}
        in_play = [size for size in in_play if size not in slow]
        at_the_end = min(seen.errors.values()) * math.sqrt((len(rates) - 1) / (_MOST_ROUNDS - 1))
        if len(rates) >= _ROUNDS and (seen.decided or at_the_end > _HOPELESS * _MOST_ERROR):
            break
    assert seen is not None
    curve = []
    for size in sorted(seen.ratios):
        logs = [math.log(timed[size]) for timed in rates if size in timed]
        median = statistics.median(logs)
        spread = math.expm1(_MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in logs))
        # In proportion to the best, so that a size that went early is as it would be at the end.
        curve.append(Rate(size, math.exp(seen.level + seen.ratios[size]), spread))
    best = max(in_play, key=lambda size: seen.ratios[size])
    certain = seen.decided or seen.error <= _MOST_ERROR
    answer = seen.batch_size if certain else max(seen.ratios)
    return Throughput(answer, best, tuple(curve), certain, len(rates), seen.error)
