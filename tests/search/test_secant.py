"""Secant: few probes, fewer failures, whatever the prediction is worth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.probe import FunctionProbe
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict
from batchfinder.search import Bounds, Bracket, Headroom, Secant
from batchfinder.search.secant import PeakModel, SecantState
from batchfinder.units import GIB, MIB

QUICK = settings(derandomize=True, deadline=None, max_examples=400)


def device(answer: int, limit: int, share: float, segment: int) -> FunctionProbe:
    """A step whose samples take `share` of the limit at `answer`, with peaks rounded up to segments."""
    fixed = int((1 - share) * limit)
    per_sample = (limit - fixed) // answer
    return FunctionProbe(lambda size, shape: -(-(fixed + per_sample * size) // segment) * segment, limit)


def truth(probe: FunctionProbe) -> int:
    """The largest size that runs."""
    low, high = 0, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if probe(middle, Shape()).fits else (low, middle)
    return low


def failures(outcome: SearchResult) -> int:
    """How many probes failed."""
    return sum(not trial.fits for trial in outcome.trials)


devices = st.builds(
    device,
    answer=st.one_of(st.integers(1, 4096), st.integers(1, 100)),
    limit=st.integers(8 * 1024, 80 * 1024).map(lambda size: size * MIB),
    share=st.floats(0.2, 1.0),
    segment=st.sampled_from([1, 512, 2 * MIB, 20 * MIB]),
)


@QUICK
@given(devices, st.floats(-0.02, 0.02))
def test_good_prediction(probe, error):
    """Within 2 % of the truth a prediction takes at most 6 probes and 1 failure, up to 4096 and within 1 %."""
    answer = truth(probe)
    if not 1 <= answer <= 4096:
        return
    search = Secant(probe.capacity_bytes, predicted=max(1, round(answer * (1 + error))))
    outcome = find_max_batch_size(probe, Shape(), search=search)
    assert len(outcome.trials) <= 6
    assert failures(outcome) <= 1
    assert answer - max(1, 0.01 * answer) <= outcome.max_batch_size <= answer


@QUICK
@given(devices)
def test_no_prediction(probe):
    """Without a prediction it takes at most 12 probes and 2 failures where the samples take a fifth or more."""
    answer = truth(probe)
    if answer > 4096:
        return
    outcome = find_max_batch_size(probe, Shape(), search=Secant(probe.capacity_bytes))
    assert len(outcome.trials) <= 12
    assert failures(outcome) <= 2
    assert answer - max(1, 0.01 * answer) <= outcome.max_batch_size <= answer


@pytest.mark.parametrize(("predicted", "most"), [(True, 3.6), (False, 5.0)])
def test_usual_cost(predicted, most):
    """On 500 random devices it takes 3.4 probes on average with a good prediction, 4.7 without, and one failure."""
    rng = random.Random(0)
    outcomes = []
    for _ in range(500):
        limit = rng.randrange(8, 80) * GIB
        probe = device(int(2 ** rng.uniform(0, 12)), limit, rng.uniform(0.2, 1), rng.choice([1, 2 * MIB, 20 * MIB]))
        guess = max(1, round(truth(probe) * rng.uniform(0.98, 1.02))) if predicted else None
        outcomes.append(find_max_batch_size(probe, Shape(), search=Secant(limit, predicted=guess)))
    assert sum(len(outcome.trials) for outcome in outcomes) / 500 <= most
    assert sum(failures(outcome) for outcome in outcomes) / 500 <= 1.02


@QUICK
@given(devices, st.one_of(st.none(), st.integers(0, 1 << 20)))
def test_exact(probe, predicted):
    """With a tolerance of 0 the answer is the exact maximum, however wrong the prediction."""
    outcome = find_max_batch_size(probe, Shape(), search=Secant(probe.capacity_bytes, 0.0, predicted))
    assert (outcome.max_batch_size, outcome.stop) == (truth(probe), StopReason.EXACT)


def tried(answer: int, search: Secant, peaks: bool = True) -> list[int]:
    """The sizes probed on a device on which exactly the sizes up to `answer` run, at 100 bytes and 1 each."""

    def probe(size: int, shape: Shape) -> Measurement:
        peak = 100 + size if peaks else None
        return Measurement(Verdict.FITS if size <= answer else Verdict.OUT_OF_MEMORY, peak, peak)

    probe.source, probe.unmodelled = "measured", ()
    outcome = find_max_batch_size(probe, Shape(), search=search)
    assert outcome.max_batch_size <= answer
    return [trial.batch_size for trial in outcome.trials]


def test_sizes_with_a_prediction():
    """0.85 of it, just under it, and the size at which a failure ends the search."""
    assert tried(1000, Secant(1100, predicted=1000)) == [850, 980, 995, 1004]


def test_a_prediction_says_where_to_begin():
    """And a line that is too flat leads no further than just above it, before a size there has run."""
    assert tried(1000, Secant(1100, predicted=1000, first_try=900)) == [900, 986, 995, 1004]
    assert tried(1000, Secant(1100, predicted=1000, bytes_per_sample=0.01))[:2] == [850, 1010]


def test_sizes_without_a_prediction():
    """The first size, as far as that is bound to fit, and then along the line."""
    assert tried(1000, Secant(1100)) == [1, 10, 816, 995, 1004]
    assert tried(1000, Secant(1100, tolerance=0.0)) == [1, 10, 820, 999, 1000, 1001]


def test_sizes_without_peaks():
    """Measurements without peaks leave the prediction, and doubling where there is none."""
    assert tried(1000, Secant(predicted=1000), peaks=False) == [980, 995, 1004]
    assert tried(9, Secant(1100), peaks=False) == [1, 2, 4, 8, 16, 12, 10, 9]


def test_prediction_too_high():
    """A prediction far too high costs a failure, then halving and the line find the way back."""
    assert tried(1000, Secant(1100, predicted=100000))[:2] == [85000, 42500]
    assert len(tried(1000, Secant(1100, predicted=100000))) <= 11


def test_small_predictions_are_tried_themselves():
    """The margin is rounded down: a prediction below 50 is where the search starts."""
    assert tried(40, Secant(predicted=40), peaks=False) == [40, 41]
    assert tried(1, Secant(101, predicted=1)) == [1, 2]


@pytest.mark.parametrize(
    ("low", "high", "points", "tries", "expected"),
    [
        (800, 1200, ((800, 900),), 3, 888 - 4),
        (800, 885, ((800, 900),), 3, 842),
        (800, 888, ((800, 900),), 3, 844),
        (800, 889, ((800, 900),), 3, 889 - 8),
        (800, 896, ((800, 900),), 3, 896 - 8),
        (800, 897, ((800, 900),), 3, 888 - 4),
        (800, 900, ((800, 999),), 3, 833),
        (800, 900, ((800, 1000),), 3, 833),
        (800, 900, ((800, 1001),), 3, 850),
        (800, 897, ((800, 900),), 8, 888 - 4),
        (800, 897, ((800, 900),), 9, 848),
        (800, None, ((800, 900),), 8, 888 - 4),
        (800, None, ((800, 1000),), 8, 808),
        (800, None, ((800, 1000),), 9, 816),
        (800, None, ((800, 1000),), 11, 864),
        (0, 800, (), 3, 400),
        (100, 400, ((100, 50), (100, 50)), 9, 250),
        (100, 401, ((100, 50), (100, 50)), 9, 200),
        (100, 401, (), 9, 250),
    ],
)
def test_one_step(low, high, points, tries, expected):
    """Near the guess, else the middle (of the logarithms where the bracket is wide).

    The next size for a limit of 1000 bytes, a tolerance of 1 % and a patience of 8.
    """
    search = Secant(1000, patience=8)
    assert search.propose(SecantState(Bracket(Bounds(), low, high), PeakModel(points), 1000, tries)) == expected


def test_surprises_grow_the_steps():
    """From the third size that ran although it was guessed to fail, the steps double."""
    sizes = tried(130, Secant(predicted=100, tolerance=0.0), peaks=False)
    assert sizes[:8] == [98, 100, 101, 102, 103, 105, 109, 117]


@pytest.mark.parametrize("answer", [1, 7, 640, 5000, 70000])
def test_peaks_that_mislead(answer):
    """Peaks that always say that the limit was reached cost no more than the bound."""

    def probe(size: int, shape: Shape) -> Measurement:
        return Measurement(Verdict.FITS, 10**6, 10**6) if size <= answer else Measurement(Verdict.OUT_OF_MEMORY)

    probe.source, probe.unmodelled = "measured", ()
    search = Secant(10**6, tolerance=0.0)
    outcome = find_max_batch_size(probe, Shape(), search=search)
    assert outcome.max_batch_size == answer
    assert len(outcome.trials) <= search.patience + 2 * answer.bit_length() + 2


def test_nested_headroom_sets_the_limit():
    """Of two headrooms the larger is aimed at."""
    for rooms in ((100, 300), (300, 100)):
        search = Headroom(Headroom(Secant(tolerance=0.0), 1200, rooms[0]), 1200, rooms[1])
        assert search.init(Shape(), Bounds()).limit_bytes == 900


def test_headroom_sets_the_limit():
    """The tighter of its own limit and a wrapper's is what the line aims at."""
    probe = FunctionProbe(lambda size, shape: 100 + size, 1200)
    for search in (Headroom(Secant(1200), 1200, 100), Headroom(Secant(), 1200, 100), Secant(1100)):
        outcome = find_max_batch_size(probe, Shape(), search=search)
        assert [trial.batch_size for trial in outcome.trials][:4] == [1, 10, 816, 995]


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("limit_bytes", 0, "limit_bytes: invalid value 0; expected a positive number of bytes."),
        ("predicted", -1, "predicted: invalid value -1; expected a size, or 0 when nothing is predicted to fit."),
        ("margin", 1.0, "margin: invalid value 1.0; expected a share from 0 to below 1, such as 0.02."),
        ("margin", -0.1, "margin: invalid value -0.1; expected a share from 0 to below 1, such as 0.02."),
        ("patience", -1, "patience: invalid value -1; expected a number of probes."),
        ("tolerance", 1.0, "tolerance: invalid value 1.0; expected a share from 0 (exact) to below 1, such as 0.01."),
    ],
)
def test_bad_settings(setting, value, message):
    """Each setting out of range is refused by name."""
    with pytest.raises(InvalidValue) as error:
        Secant(**{setting: value})
    assert str(error.value) == message
    assert Secant(limit_bytes=1, predicted=0, margin=0, patience=0)


def test_a_prediction_on_a_device_that_is_larger():
    """A prediction far too low is left behind by the line in as few probes as no prediction."""
    probe = device(4000, 40 * GIB, 0.7, 2 * MIB)
    outcome = find_max_batch_size(probe, Shape(), search=Secant(probe.capacity_bytes, predicted=40))
    assert len(outcome.trials) <= 6
    assert failures(outcome) == 1


def flat_at_first(answer: int, share: float) -> FunctionProbe:
    """A step whose optimizer takes `share` of the limit, and at small sizes half more, which hides the samples."""
    limit = 8 * GIB
    fixed = int(share * limit)
    each = (limit - fixed) // answer
    return FunctionProbe(lambda size, shape: fixed + max(fixed // 2, each * size), limit)


ANSWERS = (1, 2, 3, 5, 8, 17, 40, 83, 163, 200, 500, 1000, 2047, 4096)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("error", [-0.05, -0.03, 0.0, 0.02])
def test_flat_at_first_with_a_prediction(answer, share, error):
    """Predicted 5 % too low to 2 % too high, at most 5 probes of which 1 fails, however large the flat peak."""
    probe = flat_at_first(answer, share)
    outcome = find_max_batch_size(
        probe, Shape(), search=Secant(probe.capacity_bytes, predicted=round(answer * (1 + error)))
    )
    assert 0.99 * truth(probe) - 1 <= outcome.max_batch_size <= truth(probe)
    assert len(outcome.trials) <= 5
    assert failures(outcome) <= 1


def test_peaks_that_rise_late_do_not_lead_past_a_right_prediction():
    """Reserved memory grows in jumps: a line through the peaks of 448 and 518 says 614, and 528 is right."""
    probe = FunctionProbe(lambda size, _: int(MIB * (974 + max(0, size - 448) * 0.3 + max(0, size - 528) * 30)), GIB)
    outcome = find_max_batch_size(probe, Shape(), search=Secant(probe.capacity_bytes, predicted=528))
    assert [trial.batch_size for trial in outcome.trials] == [448, 518, 533, 528]
    assert failures(outcome) == 1


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("tolerance", [0.01, 0.0])
def test_flat_at_first_without_a_prediction(answer, share, tolerance):
    """Lines from the flat part say too much fits; it still takes at most 16 probes, of which 6 fail."""
    probe = flat_at_first(answer, share)
    outcome = find_max_batch_size(probe, Shape(), search=Secant(probe.capacity_bytes, tolerance))
    assert (1 - tolerance) * truth(probe) - (tolerance > 0) <= outcome.max_batch_size <= truth(probe)
    assert len(outcome.trials) <= 16
    assert failures(outcome) <= 6


def crowded(answer: int, more: float) -> FunctionProbe:
    """A step of which `more` is reserved than allocated, until a full card makes the allocator give it back.

    It runs up to 1 % less than what is allocated would fill the card at.
    """
    limit = 16 * GIB
    each = int(0.99 * limit / (answer + 0.5))

    class Crowded(FunctionProbe):
        def __call__(self, batch_size: int, shape: Shape) -> Measurement:
            if batch_size > answer:
                return Measurement(Verdict.OUT_OF_MEMORY)
            allocated = each * batch_size
            return Measurement(Verdict.FITS, allocated, min(limit, int((1 + more) * allocated)))

    return Crowded(lambda size, shape: 0, limit)


@pytest.mark.parametrize("more", [0.02, 0.06, 0.12, 0.3])
@pytest.mark.parametrize("answer", [53, 107, 223, 434, 1540, 3029])
def test_what_is_allocated_leads_on_where_reserved_peaks_mislead(answer, more):
    """Sizes that run although what was reserved would not have fitted lead on to what is allocated, at one failure."""
    probe = crowded(answer, more)
    outcome = find_max_batch_size(probe, Shape(), search=Secant(probe.capacity_bytes))
    assert 0.99 * answer - 1 <= outcome.max_batch_size <= answer
    assert failures(outcome) == 1
    assert len(outcome.trials) <= 9
    exact = find_max_batch_size(probe, Shape(), search=Secant(probe.capacity_bytes, tolerance=0.0))
    assert exact.max_batch_size == answer


def test_only_a_failure_below_the_guess_is_doubted():
    """What the line says fits is tried again where memory ran out; what it says does not, and a ceiling, are not."""
    search = Secant(1000)
    state = SecantState(Bracket(Bounds(), 500, None), PeakModel(((500, 500),)), 1000, 1)

    def should_retry(size: int, verdict: Verdict) -> bool:
        return search.should_retry(state, Trial(size, Shape(), Measurement(verdict)))

    assert [should_retry(size, Verdict.OUT_OF_MEMORY) for size in (600, 995, 996, 1000, 1010)] == [
        True,
        True,
        *[False] * 3,
    ]
    assert should_retry(600, Verdict.HOST_OUT_OF_MEMORY)
    assert not should_retry(600, Verdict.THRASHING)
    assert should_retry(
        1010, Verdict.FELL_BACK
    )  # whatever was expected: the next try has another kernel from the start
    assert not should_retry(600, Verdict.SIZE_CEILING)
    blind = SecantState(Bracket(Bounds(), 500, None), PeakModel(), None, 1)
    assert search.should_retry(blind, Trial(600, Shape(), Measurement(Verdict.OUT_OF_MEMORY)))


def test_the_second_try_follows_what_a_sample_is_predicted_to_add() -> None:
    """A step that takes 150 MiB more than was predicted, at all sizes alike, takes three tries and one failure."""
    probe = FunctionProbe(lambda size, shape: 150 * MIB + size * MIB, 2000 * MIB)

    def sizes(**known: float) -> list[int]:
        found = find_max_batch_size(probe, Shape(), search=Secant(2000 * MIB, 0.01, 2000, **known))
        return [trial.batch_size for trial in found.trials]

    first, second, last = sizes(bytes_per_sample=MIB)
    assert (first, second, last) == (1700, 1841, 1859)
    assert len(sizes()) > 3


def test_a_line_is_not_followed_far_from_a_prediction_that_runs() -> None:
    """Peaks of sizes next to each other move in segments: where a line through them ends is not tried at once."""
    peaks = {323: 2521, 379: 2955, 382: 2963}  # in MiB, of a GPT-2 on the CUDA stub
    probe = FunctionProbe(lambda size, shape: peaks.get(size, 2963 if size < 385 else 3000) * MIB, 2979 * MIB)
    search = Secant(2979 * MIB, 0.01, 381, (2979 - 2521) / (381 - 323) * MIB)
    found = find_max_batch_size(probe, Shape(), search=search)
    assert [trial.batch_size for trial in found.trials if not trial.fits] == [386]
    assert len(found.trials) <= 4
