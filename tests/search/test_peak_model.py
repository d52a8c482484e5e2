"""PeakModel: where a line through peaks meets the limit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.results import Measurement, Shape, Trial, Verdict
from batchfinder.search.secant import SEGMENT_BYTES, PeakModel
from batchfinder.units import GIB, MIB

QUICK = settings(derandomize=True, deadline=None, max_examples=200)


def fit(*points: tuple[int, int]) -> PeakModel:
    """A fit of (batch size, peak) points."""
    made = PeakModel()
    for size, peak in points:
        made = made.add(Trial(size, Shape(), Measurement(Verdict.FITS, peak_reserved_bytes=peak)))
    return made


def test_nothing():
    """Without peaks there is nothing to say."""
    assert PeakModel().crossing(100) is None
    assert fit((1, 0)).crossing(100) is None


def test_what_counts():
    """Reserved bytes count before allocated ones; a failure, or a size without peaks, adds nothing."""
    ran = Measurement(Verdict.FITS, peak_allocated_bytes=3, peak_reserved_bytes=5)
    assert PeakModel().add(Trial(2, Shape(), ran)).points == ((2, 5),)
    assert PeakModel().add(Trial(2, Shape(), Measurement(Verdict.FITS, peak_allocated_bytes=3))).points == ((2, 3),)
    assert PeakModel().add(Trial(2, Shape(), Measurement(Verdict.FITS))).points == ()
    assert PeakModel().add(Trial(2, Shape(), Measurement(Verdict.OUT_OF_MEMORY, 3, 5))).points == ()


def test_one_point():
    """One peak is scaled as if the samples took all of it."""
    assert fit((4, 20)).crossing(104) == 20


def test_two_points():
    """Two peaks make a line; limits too small to have segments are met to the sample."""
    assert fit((1, 110), (8, 180)).crossing(500) == 40
    assert fit((1, 110), (8, 180)).crossing(499) == 39


def test_the_nearest_point_that_is_well_apart():
    """A line is drawn from the last point at most three quarters as large, so that rounding does not tilt it."""
    limit = 512 * 300  # where rounding counts as 300 bytes
    assert fit((1, 1000), (6, 1200), (8, 2000)).crossing(limit) == 8 + (limit - 2000) * 2 // (800 + 300)
    assert fit((1, 1000), (7, 1200), (8, 2000)).crossing(limit) == 8 + (limit - 2000) * 7 // (1000 + 300)


def test_a_clear_rise_at_the_end():
    """Where the last two peaks are far apart, a line that is flat because it begins far below is not believed."""
    limit = 512 * 300
    assert fit((1, 1000), (7, 1200), (8, 2401)).crossing(limit) == 8 + (limit - 2401) // (1201 + 300)
    assert fit((1, 1000), (7, 1200), (8, 2400)).crossing(limit) == 8 + (limit - 2400) * 7 // (1400 + 300)


def test_falling_peaks():
    """Peaks that fall say nothing."""
    assert fit((1, 110), (8, 100)).crossing(500) is None


def test_flat_peaks():
    """Peaks a segment apart or less carry the line sixteenfold at most, clearly rising ones as far as it goes."""
    assert fit((1, GIB), (2, GIB)).crossing(40 * GIB) == 32
    assert fit((1, GIB), (2, GIB + 20 * MIB)).crossing(40 * GIB) == 32
    assert fit((1, GIB), (2, GIB + 21 * MIB)).crossing(40 * GIB) > 900


@QUICK
@given(
    fixed=st.integers(0, 8 * GIB),
    per_sample=st.integers(MIB, GIB),
    segment=st.sampled_from([512, 2 * MIB, SEGMENT_BYTES]),
    small=st.integers(1, 50),
    more=st.integers(1, 200),
)
def test_never_too_high(fixed, per_sample, segment, small, more):
    """On an affine curve rounded up to segments the guess is never above the truth before rounding, plus one."""

    def peak(size: int) -> int:
        return -(-(fixed + per_sample * size) // segment) * segment

    limit = max(12 * GIB, peak(small + more))
    guess = fit((small, peak(small)), (small + more, peak(small + more))).crossing(limit)
    assert guess is not None
    assert guess <= (limit - fixed) // per_sample + 1


def told(*points: tuple[int, int, int, int]) -> PeakModel:
    """A fit of (batch size, peak, bytes that stay, bytes of the forward)."""
    made = PeakModel()
    for size, peak, stays, forward in points:
        seen = Measurement(Verdict.FITS, None, peak, resting_bytes=stays, forward_bytes=forward)
        made = made.add(Trial(size, Shape(), seen))
    return made


def test_the_least_that_stays():
    """What stays may grow with the size, where a batch outlives its step: the least counts, beside all forwards."""
    made = told((1, 500, 300, 20), (2, 500, 310, 30))
    assert (made.resting_bytes, made.forwards) == (300, ((1, 20), (2, 30)))
    assert fit((1, 500)).lower_bound(1000) is None


def test_one_peak_that_is_told_of():
    """From one size the larger of three: the line to what stays, the steepest growth, a share of the forward's."""
    assert told((1, 400, 300, 1000)).lower_bound(1000) == 7
    assert told((1, 999, 0, 100)).lower_bound(1200) == 1 + int(201 / 160)
    assert told((10, 500, 300, 100)).crossing(1000) == int(0.6 * (10 + 600 / 10))
    assert told((1, 500, 300, 1)).crossing(1000) == 64


def test_beyond_the_flat_part():
    """Between two sizes beyond the flat part a line is followed, unless it rises less than the forward does."""
    assert told((1, 400, 300, 10), (20, 500, 300, 200), (40, 700, 300, 400)).crossing(1000) == 40 + 300 * 20 // 201
    slow = told((1, 400, 300, 10), (20, 500, 300, 200), (40, 670, 300, 400))
    assert slow.crossing(1000) == slow.lower_bound(1000) == 40 * 700 // 370


def test_far_guesses_fall_short():
    """Beyond twice the last size nine tenths of the guess are aimed at."""
    far = told((1, 400, 300, 10), (20, 500, 300, 200))
    assert far.lower_bound(1000) == 70
    assert far.crossing(1000) == 63
