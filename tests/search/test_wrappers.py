"""Wrappers: each changes one thing, in any order."""

from __future__ import annotations

import itertools

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.probe import FunctionProbe
from batchfinder.results import Measurement, Shape, StopReason, Trial, Verdict
from batchfinder.search import DEFAULT_MAX_BATCH_SIZE, Capped, Doubling, Floored, Headroom, Multiples, Wrapper
from batchfinder.units import GIB, MIB


def found(answer: int, search) -> tuple[int, StopReason, list[int]]:
    """Answer, stop and sizes on a device on which exactly the sizes up to `answer` run."""
    outcome = find_max_batch_size(FunctionProbe(lambda size, shape: size, answer), Shape(), search=search)
    return outcome.max_batch_size, outcome.stop, [trial.batch_size for trial in outcome.trials]


def test_capped():
    """Nothing above the cap is tried; the smallest of several counts."""
    assert found(999, Capped(Capped(Doubling(), 5), 7)) == (5, StopReason.CAP, [1, 2, 4, 5])
    assert found(999, Capped(Capped(Doubling(), 7), 5)) == (5, StopReason.CAP, [1, 2, 4, 5])


def test_capped_above_the_default():
    """A cap above the default one is taken at its word."""
    cap = 2 * DEFAULT_MAX_BATCH_SIZE
    assert found(cap, Capped(Doubling(), cap))[:2] == (cap, StopReason.CAP)


def test_floored():
    """The search starts at the floor; the largest of several counts."""
    assert found(25, Floored(Floored(Doubling(), 20), 10)) == (25, StopReason.EXACT, [20, 40, 30, 25, 27, 26])


def test_floor_fails():
    """A floor that does not run is answered with 0 after one probe, though smaller sizes would run."""
    assert found(25, Floored(Doubling(), 26)) == (0, StopReason.EXACT, [26])


def test_multiples():
    """Only multiples are tried; wrapped twice, multiples of both."""
    assert found(40, Multiples(Doubling(), 8)) == (40, StopReason.EXACT, [8, 16, 32, 64, 48, 40])
    assert found(40, Multiples(Multiples(Doubling(), 4), 6))[0] == 36


def test_headroom():
    """A size that leaves too little free counts as a failure, and says what it leaves."""
    probe = FunctionProbe(lambda size, shape: size * GIB, 12 * GIB)
    outcome = find_max_batch_size(probe, Shape(), search=Headroom(Doubling(), 12 * GIB, 3 * GIB))
    assert outcome.max_batch_size == 9
    refused = {trial.batch_size: trial.measurement for trial in outcome.trials}[10]
    assert refused.verdict is Verdict.HEADROOM
    assert refused.message == "its peak of 10.00 GiB leaves 2.00 GiB of 12.00 GiB free; the headroom is 3.00 GiB"
    assert refused.peak_reserved_bytes == 10 * GIB


@pytest.mark.parametrize(
    ("measurement", "verdict"),
    [
        (Measurement(Verdict.FITS, 10, 80), Verdict.FITS),
        (Measurement(Verdict.FITS, 10, 81), Verdict.HEADROOM),
        (Measurement(Verdict.FITS, 81), Verdict.HEADROOM),
        (Measurement(Verdict.FITS), Verdict.FITS),
        (Measurement(Verdict.THRASHING, 10, 81), Verdict.THRASHING),
    ],
)
def test_headroom_judges_what_it_can_see(measurement, verdict):
    """Reserved bytes count before allocated ones; without peaks, or for a failure, the verdict stays."""
    judged = Headroom(Doubling(), 100, 20).judge(Trial(4, Shape(), measurement))
    assert judged.measurement.verdict is verdict


def test_any_order():
    """All orders of the four wrappers try the same sizes."""
    wraps = [
        lambda search: Capped(search, 100),
        lambda search: Floored(search, 10),
        lambda search: Multiples(search, 8),
        lambda search: Headroom(search, 90, 15),
    ]
    seen = set()
    for order in itertools.permutations(wraps):
        search = Doubling()
        for wrap in order:
            search = wrap(search)
        answer, stop, sizes = found(90, search)
        seen.add((answer, stop, tuple(sizes)))
    assert seen == {(72, StopReason.EXACT, (16, 32, 64, 96, 80, 72))}


def test_a_wrapper_of_your_own():
    """A wrapper that overrides nothing changes nothing."""
    assert found(11, Wrapper(Doubling())) == found(11, Doubling())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Capped(Doubling(), 0), "max_batch_size: invalid value 0; expected a size of at least 1."),
        (lambda: Floored(Doubling(), 0), "min_batch_size: invalid value 0; expected a size of at least 1."),
        (lambda: Multiples(Doubling(), 0), "multiple_of: invalid value 0; expected a size of at least 1."),
        (
            lambda: Headroom(Doubling(), 64 * MIB, 64 * MIB),
            "headroom_bytes: invalid value 67108864; expected from 0 bytes to less than the limit of 64.00 MiB.",
        ),
        (
            lambda: Headroom(Doubling(), 64 * MIB, -1),
            "headroom_bytes: invalid value -1; expected from 0 bytes to less than the limit of 64.00 MiB.",
        ),
    ],
)
def test_bad_settings(make, message):
    """Invalid settings are refused by name."""
    with pytest.raises(InvalidValue) as error:
        make()
    assert str(error.value) == message
    assert Capped(Doubling(), 1)
    assert Floored(Doubling(), 1)
    assert Multiples(Doubling(), 1)
    assert Headroom(Doubling(), 1, 0)


def test_contradiction():
    """A floor above the cap is refused when the search starts, whichever is outside."""
    for search in (Floored(Capped(Doubling(), 4), 8), Capped(Floored(Doubling(), 8), 4)):
        with pytest.raises(InvalidValue, match="max_batch_size: invalid value 4; expected at least 8"):
            found(9, search)
