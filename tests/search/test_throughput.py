"""Which size is at full speed, on functions whose answer is known, with noise of several kinds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from batchfinder.results import Throughput
from batchfinder.search import Bounds
from batchfinder.search.throughput import NEAR_BEST, find_full_speed, sizes_to_time

SHAPES = ("ramp", "saturating", "falling", "drift", "outliers")


def curve(seed: int) -> tuple[list[int], Callable[[int], float], random.Random]:
    """Sizes up to a random largest, samples per second by size, and random numbers for the noise."""
    numbers, shape = random.Random(seed), SHAPES[seed % len(SHAPES)]
    largest = numbers.randint(40, 600)
    knee, top = numbers.uniform(2, largest), numbers.uniform(50, 5000)
    half, fall = numbers.uniform(0.2, largest / 5), numbers.uniform(0, 0.02)

    def rate(size: int) -> float:
        if shape == "saturating":
            return top * size / (size + half)
        falls = fall * max(0.0, math.log2(size / knee)) if shape == "falling" else 0.0
        return top * min(1.0, size / knee) * (1 - falls)

    return sizes_to_time(largest, Bounds()), rate, numbers


def measure(seed: int, noise: float) -> Throughput:
    """What is found where timings scatter by `noise`; of two shapes they drift by a fourth, or have outliers."""
    sizes, rate, numbers = curve(seed)
    count = 0

    def measured(size: int) -> float:
        nonlocal count
        count += 1
        value = rate(size) * math.exp(numbers.gauss(0, noise))
        if SHAPES[seed % len(SHAPES)] == "drift":
            return value * (0.75 + 0.25 * math.exp(-count / 40))
        slowed = SHAPES[seed % len(SHAPES)] == "outliers" and numbers.random() < 0.1
        return value / numbers.uniform(1.2, 3) if slowed else value

    found = find_full_speed(sizes, measured)
    assert found is not None
    return found


def right_answers(seed: int) -> set[int]:
    """The smallest size within 3 % of the best, and its neighbours where a rate is within 0.5 % of that border."""
    sizes, rate, _ = curve(seed)
    ratios = [rate(size) / max(map(rate, sizes)) for size in sizes]
    place = next(place for place, ratio in enumerate(ratios) if ratio >= NEAR_BEST)
    near = {neighbour for neighbour in (place - 1, place + 1) if 0 <= neighbour < len(sizes)}
    close = {other for other in near if min(abs(ratios[at] - NEAR_BEST) for at in (place, other)) <= 0.005}
    return {sizes[at] for at in {place} | close}


def test_at_least_95_of_100_functions_with_a_known_plateau_are_answered_right() -> None:
    """Five shapes, timings that scatter by 0.2 to 2 %; saying that it cannot tell does not count as right."""
    found = {seed: measure(seed, 0.002 + 0.00018 * seed) for seed in range(100)}
    right = [seed for seed, each in found.items() if each.certain and each.batch_size in right_answers(seed)]
    assert len(right) >= 95


def test_on_very_noisy_functions_it_says_that_it_cannot_tell() -> None:
    """The answer is the largest size then, and the words say by how much the timings scatter; it gives up early."""
    found = [measure(seed, 0.3) for seed in range(20)]
    unsure = [(seed, each) for seed, each in enumerate(found) if not each.certain]
    assert len(unsure) >= 19
    assert all(each.batch_size == curve(seed)[0][-1] for seed, each in unsure)
    assert sum(each.rounds for each in found) < 8 * len(found)
    assert str(found[0]) == f"full speed: cannot tell, the timings scatter by {100 * found[0].scatter:.1f} %"
    assert 0.2 < found[0].scatter < 0.9


def test_steady_timings_take_five_rounds_and_slow_sizes_three() -> None:
    """Of a device that is busy from 32 samples on: each size once a round, in another order each time."""
    calls: list[int] = []

    def rate(size: int) -> float:
        calls.append(size)
        return 100.0 * min(size, 32)

    sizes = sizes_to_time(128, Bounds())
    found = find_full_speed(sizes, rate)
    assert found is not None
    assert (found.batch_size, found.certain, found.rounds) == (32, True, 5)
    assert (calls.count(32), calls.count(23), calls.count(1)) == (5, 3, 3)
    first, second = calls[: len(sizes)], calls[len(sizes) : 2 * len(sizes)]
    assert sorted(first) == sorted(second) == sizes
    assert first != second
    assert [each.batch_size for each in found.rates] == sizes
    assert str(found) == "full speed from 32 on, at 3,200 ± 0.0 % samples/s"


def test_a_size_that_stops_running_leaves_play() -> None:
    """It is in neither the answer nor the curve; where none runs there is no answer."""
    calls: list[int] = []

    def rate(size: int) -> float | None:
        calls.append(size)
        return None if size == 128 and calls.count(128) > 1 else float(size)

    found = find_full_speed(sizes_to_time(128, Bounds()), rate)
    assert found is not None
    assert (found.batch_size, found.best_batch_size, calls.count(128)) == (91, 91, 2)
    assert max(each.batch_size for each in found.rates) == 91
    assert find_full_speed([1, 2], lambda size: None) is None


@pytest.mark.parametrize(
    ("largest", "bounds", "sizes"),
    [
        (10, Bounds(), [1, 2, 4, 5, 7, 10]),
        (96, Bounds(min_batch_size=20, multiple_of=8), [24, 32, 48, 64, 96]),
        (3, Bounds(min_batch_size=3), [3]),
    ],
)
def test_sizes_go_down_in_steps_of_the_root_of_two(largest: int, bounds: Bounds, sizes: list[int]) -> None:
    """To the smallest that may be tried, and on multiples."""
    assert sizes_to_time(largest, bounds) == sizes
