"""Accumulation: exact where that is not slow or is asked for, and said where it is not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.accumulation import plan_accumulation
from batchfinder.errors import BatchFinderError, InvalidValue, OutOfMemory

QUICK = settings(derandomize=True, deadline=None, max_examples=300)


@QUICK
@given(st.integers(1, 120), st.integers(1, 130), st.integers(1, 20))
def test_exact_against_brute_force(target, largest, devices):
    """Of all plans that fit, the exact one is the nearest to the target, then that with the fewest micro-batches."""
    plan = plan_accumulation(target, largest, devices, exact=True)
    best = min(
        (abs(micro * times * devices - target), times, -micro)
        for micro in range(1, largest + 1)
        for times in range(1, target + 2)
        if micro * times * devices < target + devices or micro * times == 1
    )
    assert (abs(plan.deviation), plan.accumulation, -plan.micro_batch_size) == best
    assert plan.effective_batch_size == plan.micro_batch_size * plan.accumulation * devices
    assert plan.deviation == plan.effective_batch_size - target
    assert plan.exact == (target % devices == 0)
    assert (plan.target_batch_size, plan.num_devices) == (target, devices)
    assert plan.micro_batch_size <= largest


@QUICK
@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 9))
def test_neither_slow_nor_far_from_the_target(target, largest, devices):
    """What is not exact is off by no more than makes up for the micro-batch, and takes about the fewest of them."""
    exact, plan = (plan_accumulation(target, largest, devices, exact=only) for only in (True, False))
    fewest = -(-target // (devices * largest))
    assert plan.micro_batch_size <= largest
    assert plan == exact or plan.accumulation in (fewest - 1, fewest, fewest + 1)
    shortest = max(0, 1 - exact.micro_batch_size / -(-target // (devices * fewest)))
    assert abs(plan.deviation) <= abs(exact.deviation) + shortest / 20 * target + 1e-9
    if shortest <= 0.05:
        assert plan == exact


@pytest.mark.parametrize(
    ("arguments", "text", "exact"),
    [
        ((254, 64), "64 x 4 = 256 (2 more than the target of 254)", "2 x 127 = 254"),
        ((1018, 128), "127 x 8 = 1016 (2 fewer than the target of 1018)", "2 x 509 = 1018"),
        ((257, 100), "86 x 3 = 258 (1 more than the target of 257)", "1 x 257 = 257"),
        ((1024, 216), "205 x 5 = 1025 (1 more than the target of 1024)", "128 x 8 = 1024"),
        ((64, 24), "16 x 4 = 64", "16 x 4 = 64"),
        ((508, 64, 2), "64 x 4 x 2 devices = 512 (4 more than the target of 508)", "2 x 127 x 2 devices = 508"),
    ],
)
def test_a_target_that_no_large_micro_batch_divides(arguments, text, exact):
    """It is met nearly, unless it is asked for exactly."""
    assert (str(plan_accumulation(*arguments)), str(plan_accumulation(*arguments, exact=True))) == (text, exact)


def test_a_smallest_micro_batch():
    """A target that smaller ones would make up is met nearly, to within 5 %, or refused."""
    assert str(plan_accumulation(46, 8)) == "2 x 23 = 46"
    assert str(plan_accumulation(46, 8, min_batch_size=3)) == "8 x 6 = 48 (2 more than the target of 46)"
    for target, largest, exact in ((46, 8, True), (7, 4, False)):
        with pytest.raises(InvalidValue) as error:
            plan_accumulation(target, largest, min_batch_size=3, exact=exact)
        assert str(error.value) == (
            f"target_batch_size: invalid value {target}; "
            f"expected a multiple of any size from 3 to {largest}, which fit."
        )


def test_the_exact_plan_beside_one_that_misses():
    """The largest micro-batch that meets the target, where it is of use; nothing beside a plan that does."""
    assert plan_accumulation(256, 15).beside_exact() == "15 x 17 = 255 (exactly 256: 8 x 32)"
    assert plan_accumulation(256, 16).beside_exact() == "16 x 16 = 256"
    assert plan_accumulation(512, 15, 2).beside_exact() == "15 x 17 x 2 = 510 (exactly 512: 8 x 32 x 2)"
    assert plan_accumulation(256, 15).beside_exact(min_batch_size=9) == "15 x 17 = 255"
    assert (
        plan_accumulation(1016, 256, multiple_of=4).beside_exact(multiple_of=4)
        == "256 x 4 = 1024 (exactly 1016: 8 x 127)"
    )
    for target, largest in itertools.product(range(2, 80), range(1, 30)):
        plan = plan_accumulation(target, largest)
        exact = plan.exactly()
        divisors = [size for size in range(1, largest + 1) if target % size == 0]
        assert plan.exact if exact is None else (exact.micro_batch_size, exact.exact) == (max(divisors), True)


def test_multiples():
    """All is planned in multiples, exactly as without them in ones; nothing fits where not one multiple does."""
    assert str(plan_accumulation(8 * 254, 8 * 64 + 7, multiple_of=8)) == (
        "512 x 4 = 2048 (16 more than the target of 2032)"
    )
    assert str(plan_accumulation(8 * 254, 8 * 64 + 7, multiple_of=8, exact=True)) == "16 x 127 = 2032"
    with pytest.raises(OutOfMemory, match="batch size 8 does not fit"):
        plan_accumulation(64, 7, multiple_of=8)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((256, 8), "8 x 32 = 256"),
        ((256, 256), "256 x 1 = 256"),
        ((256, 255), "128 x 2 = 256"),
        ((256, 1000), "256 x 1 = 256"),
        ((1024, 64, 4), "64 x 4 x 4 devices = 1024"),
        ((10, 3), "2 x 5 = 10"),
        ((100, 11, 3), "11 x 3 x 3 devices = 99 (1 fewer than the target of 100)"),
        ((101, 30, 3), "17 x 2 x 3 devices = 102 (1 more than the target of 101)"),
        ((1, 30, 8), "1 x 1 x 8 devices = 8 (7 more than the target of 1)"),
    ],
)
def test_text(arguments, text):
    """A plan reads as the sum it is, and states any deviation."""
    assert str(plan_accumulation(*arguments)) == text


def test_equally_near():
    """Of two sums equally far from the target the one with fewer, then larger, micro-batches is taken."""
    assert plan_accumulation(3, 1, 2).effective_batch_size == 2
    assert plan_accumulation(3, 2, 2).effective_batch_size == 4


def test_nothing_fits():
    """A maximum of 0 cannot be accumulated, and says so."""
    with pytest.raises(OutOfMemory) as error:
        plan_accumulation(256, 0)
    assert str(error.value) == "batch size 1 does not fit: there is no micro-batch to accumulate to 256"
    assert isinstance(error.value, BatchFinderError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "target_batch_size: invalid value 0; expected a size of at least 1."),
        ((8, -1), "max_batch_size: invalid value -1; expected the largest size that fits, or 0 when none does."),
        ((9, 8, 1, 4), "target_batch_size: invalid value 9; expected a multiple of 4, as multiple_of asks."),
        ((8, 8, 1, 0), "multiple_of: invalid value 0; expected a size of at least 1."),
        ((8, 8, 0), "num_devices: invalid value 0; expected at least 1 device."),
    ],
)
def test_bad_arguments(arguments, message):
    """Arguments that cannot be meant are refused by name."""
    *arguments, multiple_of = arguments if len(arguments) == 4 else (*arguments, 1)
    with pytest.raises(InvalidValue) as error:
        plan_accumulation(*arguments, multiple_of=multiple_of)
    assert str(error.value) == message


def test_frozen():
    """A plan cannot be changed after it was made."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_accumulation(256, 8).accumulation = 1
