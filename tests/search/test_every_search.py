"""Every search, bare and wrapped, on every kind of memory curve, against brute force."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Verdict
from batchfinder.search import (
    DEFAULT_MAX_BATCH_SIZE,
    Bisection,
    Bounds,
    Capped,
    Doubling,
    Floored,
    Headroom,
    Multiples,
    Search,
    Secant,
)

QUICK = settings(derandomize=True, deadline=None, max_examples=400)
CAPACITY = 1000


@dataclass
class CurveProbe:
    """A device of `CAPACITY` bytes: peaks listed for sizes 1, 2, ..., and one peak for all larger ones."""

    peaks: list[int]
    tail: int
    reports: str = "reserved"
    source = "simulated"
    unmodelled: tuple[str, ...] = ()

    def peak(self, size: int) -> int:
        return self.peaks[size - 1] if size <= len(self.peaks) else self.tail

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        assert isinstance(batch_size, int)
        assert batch_size >= 1
        peak = self.peak(batch_size)
        if peak > CAPACITY:
            return Measurement(Verdict.OUT_OF_MEMORY)
        if self.reports == "nothing":
            return Measurement(Verdict.FITS)
        if self.reports == "allocated":
            return Measurement(Verdict.FITS, peak)
        if self.reports == "readings":
            # No more to be relied on than the peaks: a search may be misled, and must still come right.
            stays, forward = (37 * batch_size) % (peak + 50), (batch_size * batch_size * 11) % 900
            return Measurement(Verdict.FITS, peak // 2, peak, resting_bytes=stays, forward_bytes=forward)
        return Measurement(Verdict.FITS, peak // 2, peak)


@dataclass
class Case:
    """A search, and what its wrappers ought to come to."""

    search: Search
    core: Search
    floor: int = 1
    cap: int = DEFAULT_MAX_BATCH_SIZE
    of: int = 1
    usable: int = CAPACITY

    @property
    def first(self) -> int:
        return next(size for size in range(self.of, self.floor + self.of, self.of) if size >= self.floor)

    @property
    def last(self) -> int:
        return self.cap - self.cap % self.of

    def runs(self, probe: CurveProbe, size: int) -> bool:
        return probe.peak(size) <= (CAPACITY if probe.reports == "nothing" else self.usable)

    def brute_force(self, probe: CurveProbe) -> int:
        """The largest size that may be tried and runs, where everything below it does."""
        answer = 0
        for size in range(self.first, min(self.last, len(probe.peaks) + self.of + self.first) + 1, self.of):
            if not self.runs(probe, size):
                return answer
            answer = size
        return self.last


sizes = st.integers(1, 160)
tolerances = st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5])
steps = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 400)), min_size=1, max_size=150)
reports = st.sampled_from(["reserved", "readings", "allocated", "nothing"])


@st.composite
def monotone_probes(draw) -> CurveProbe:
    """Steps and plateaus, straight lines, and curves on which nothing or everything runs."""
    if draw(st.booleans()):
        start, slope, length = draw(st.integers(0, 1100)), draw(st.integers(0, 60)), draw(sizes)
        peaks = [start + slope * size for size in range(1, length + 1)]
    else:
        peaks = [draw(st.integers(0, 1100))]
        for step in draw(steps):
            peaks.append(peaks[-1] + step)
    tail = draw(st.sampled_from([peaks[-1], max(peaks[-1], CAPACITY + 1)]))
    return CurveProbe(peaks, tail, draw(reports))


@st.composite
def any_probes(draw) -> CurveProbe:
    """Curves with no order at all."""
    peaks = draw(st.lists(st.integers(0, 1600), min_size=1, max_size=150))
    return CurveProbe(peaks, draw(st.sampled_from([500, CAPACITY + 1])), draw(reports))


@st.composite
def cores(draw) -> Search:
    """Each algorithm, with all kinds of settings."""
    tolerance = draw(tolerances)
    kind = draw(st.sampled_from(["doubling", "bisection", "secant", "secant"]))
    if kind == "doubling":
        return Doubling(tolerance)
    if kind == "bisection":
        low = draw(st.integers(0, 150))
        return Bisection(low, low + draw(sizes), tolerance)
    return Secant(
        limit_bytes=draw(st.one_of(st.none(), st.just(CAPACITY), st.integers(1, 3000))),
        tolerance=tolerance,
        predicted=draw(st.one_of(st.none(), st.integers(0, 170))),
        margin=draw(st.sampled_from([0.0, 0.02, 0.3])),
        patience=draw(st.sampled_from([0, 3, 8])),
    )


@st.composite
def cases(draw) -> Case:
    """An algorithm in up to four wrappers, in any order."""
    core = draw(cores())
    case = Case(core, core)
    for kind in draw(st.lists(st.sampled_from(["cap", "floor", "of", "headroom"]), max_size=4)):
        if kind == "cap":
            cap = draw(sizes)
            case = Case(Capped(case.search, cap), core, case.floor, min(case.cap, cap), case.of, case.usable)
        elif kind == "floor":
            floor = draw(st.integers(1, 40))
            case = Case(Floored(case.search, floor), core, max(case.floor, floor), case.cap, case.of, case.usable)
        elif kind == "of":
            of = draw(st.integers(1, 9))
            case = Case(Multiples(case.search, of), core, case.floor, case.cap, math.lcm(case.of, of), case.usable)
        else:
            room = draw(st.integers(0, 999))
            usable = min(case.usable, CAPACITY - room)
            case = Case(Headroom(case.search, CAPACITY, room), core, case.floor, case.cap, case.of, usable)
    return case


def run(case: Case, probe: CurveProbe) -> SearchResult:
    """Find, and check what holds for any curve."""
    outcome = find_max_batch_size(probe, Shape(), search=case.search)
    probed = [trial.batch_size for trial in outcome.trials]
    failed = {trial.batch_size for trial in outcome.trials if not trial.fits}
    ran = {trial.batch_size: trial.measurement for trial in outcome.trials if trial.fits}
    answer = outcome.max_batch_size

    assert len(probed) == len(set(probed)), "a size was probed twice"
    assert all(case.first <= size <= case.last and size % case.of == 0 for size in probed), "a size was out of bounds"
    assert all((size in ran) == case.runs(probe, size) for size in probed)
    assert answer == max(ran, default=0), "the answer is not the largest size that ran"
    expected = next(trial.measurement for trial in outcome.trials if trial.batch_size == (answer or min(probed)))
    assert outcome.measurement is expected, "not the measurement of the answer, or of the smallest failure"
    above = max(case.first, answer + case.of)
    if outcome.stop is StopReason.CAP:
        assert answer == case.last
    elif outcome.stop is StopReason.EXACT:
        assert above in failed
    else:
        assert case.core.tolerance > 0
        assert min(failed) - answer <= case.core.tolerance * min(failed)
    assert len(probed) <= most_probes(case, answer), f"{len(probed)} probes"
    return outcome


def most_probes(case: Case, answer: int) -> int:
    """The bound in each algorithm's docstring."""
    core = case.core
    if isinstance(core, Doubling):
        return max(1, 2 * (answer // case.of).bit_length())
    if isinstance(core, Bisection):
        inside = math.ceil(math.log2(core.high - core.low)) + 2
        if core.low <= answer < core.high and case.search is core:
            return inside
        return inside + 2 * max(core.high, answer, case.first).bit_length() + 2
    assert isinstance(core, Secant)
    return core.patience + 2 * case.last.bit_length() + 2


@QUICK
@given(cases(), monotone_probes())
def test_monotone_curves(case, probe):
    """On a curve that never falls the answer is brute force's, or within the tolerance below it."""
    if case.last < case.first:
        with pytest.raises(InvalidValue, match="max_batch_size"):
            case.search.init(Shape(), Bounds())
        return
    outcome = run(case, probe)
    truth = case.brute_force(probe)
    assert outcome.max_batch_size <= truth
    if case.core.tolerance == 0:
        assert outcome.max_batch_size == truth
        assert outcome.stop is (StopReason.CAP if truth == case.last else StopReason.EXACT)
    else:
        assert truth - outcome.max_batch_size <= case.core.tolerance * (truth + case.of)


@QUICK
@given(cases(), any_probes())
def test_any_curve(case, probe):
    """On a curve with no order the answer still ran, the next size up failed or is barred, and the search ends."""
    if case.last >= case.first:
        run(case, probe)


@QUICK
@given(cores(), st.integers(0, 900), st.integers(1, 30), st.integers(1, 160), reports)
def test_affine_curves_at_full_size(core, fixed, per_sample, scale, reported):
    """Answers in the thousands are found as exactly as small ones."""
    probe = CurveProbe([fixed + per_sample * size // scale for size in range(1, 4097)], CAPACITY + 1, reported)
    case = Case(core, core)
    outcome, truth = run(case, probe), case.brute_force(probe)
    assert truth * (1 - core.tolerance) - 1 <= outcome.max_batch_size <= truth
    if core.tolerance == 0:
        assert outcome.max_batch_size == truth


@pytest.mark.parametrize("core", [Doubling(), Bisection(3, 9), Secant(CAPACITY), Secant(predicted=7)], ids=repr)
def test_first_size_fails(core):
    """Where not even one sample fits the answer is 0, and no larger size stays in question."""
    probe = CurveProbe([CAPACITY + 1], CAPACITY + 1)
    outcome = run(Case(core, core), probe)
    assert (outcome.max_batch_size, outcome.stop) == (0, StopReason.EXACT)


@pytest.mark.parametrize("core", [Doubling(), Bisection(3, 9), Secant(CAPACITY), Secant(predicted=7)], ids=repr)
@pytest.mark.parametrize("reported", ["reserved", "readings", "nothing"])
def test_a_curve_without_end(core, reported):
    """Where everything fits the search ends at the default cap."""
    outcome = run(Case(core, core), CurveProbe([1], 1, reported))
    assert (outcome.max_batch_size, outcome.stop) == (DEFAULT_MAX_BATCH_SIZE, StopReason.CAP)
    assert DEFAULT_MAX_BATCH_SIZE == 1048576
