from __future__ import annotations

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.outcome import Shape
from batchfinder.probe import FunctionProbe
from batchfinder.probing.certified import certified_search
from batchfinder.search import Capped, Floored, Multiples

GIB = 1 << 30


def _find(fixed, each, limit, predicted, tolerance=0.01, wrap=lambda search: search, flat=0):
    # As a training step is: at small sizes the optimizer's peak, which is flat, hides what the samples take.
    probe = FunctionProbe(lambda size, shape: fixed + max(flat, each * size), limit)
    return find_max_batch_size(probe, Shape(), search=wrap(certified_search(predicted, limit, tolerance)))


def _failures(outcome):
    return sum(not trial.fits for trial in outcome.trials)


ANSWERS = (1, 2, 3, 5, 8, 17, 40, 83, 163, 200, 500, 1000, 2047, 4096)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("error", [-0.05, -0.03, 0.0, 0.02])
def test_with_a_prediction_five_probes_and_one_failure(answer, share, error):
    """For any answer to 4096, predicted 5 % too low to 2 % too high, at most 5 probes of which 1 fails.

    The answer is within 1 % of the truth and never above it, however large and flat the optimizer's peak.
    """
    limit = 8 * GIB
    fixed = int(share * limit)
    each = (limit - fixed) // answer
    outcome = _find(fixed, each, limit, round(answer * (1 + error)), flat=fixed // 2)
    truth = (limit - fixed) // each
    assert 0.99 * truth - 1 <= outcome.max_batch_size <= truth
    assert len(outcome.trials) <= 5
    assert _failures(outcome) <= 1


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("answer", ANSWERS)
def test_without_one_it_takes_care_on_the_first_stride(answer, share):
    """With real probes alone, on a straight line, 1 failure still, in at most 7 probes."""
    limit = 8 * GIB
    fixed = int(share * limit)
    each = (limit - fixed) // answer
    outcome = _find(fixed, each, limit, None)
    truth = (limit - fixed) // each
    assert 0.99 * truth - 1 <= outcome.max_batch_size <= truth
    assert len(outcome.trials) <= 7
    assert _failures(outcome) <= 1


def test_two_points_are_not_trusted_far():
    """Nothing predicted and flat at first: the third probe is at most 8 times the second, and runs."""
    outcome = _find(GIB, 11_000_003, 2 * GIB, None, flat=60_000_000)
    sizes = [trial.batch_size for trial in outcome.trials]
    assert sizes[2] <= 8 * sizes[1]
    assert outcome.trials[2].fits


@pytest.mark.parametrize("predicted", [None, 60, 100, 140])
def test_a_tolerance_of_zero_is_exact(predicted):
    """The exact maximum, whatever was predicted."""
    outcome = _find(GIB, 11_000_003, 2 * GIB, predicted, tolerance=0.0)
    assert outcome.max_batch_size == GIB // 11_000_003


@pytest.mark.parametrize("wrap", [lambda s: Multiples(s, 8), lambda s: Capped(s, 60), lambda s: Floored(s, 4)])
def test_it_can_be_wrapped(wrap):
    """Under a granularity, a cap or a floor it still proposes only what may be tried, and ends."""
    outcome = _find(GIB, 11_000_003, 2 * GIB, None, 0.0, wrap)
    truth = GIB // 11_000_003
    assert outcome.max_batch_size in (truth, truth // 8 * 8, 60)


def test_nothing_fits():
    """0 where not even one sample fits."""
    assert _find(2 * GIB, 1, GIB, None).max_batch_size == 0


def test_settings_are_checked():
    """A tolerance of all is refused."""
    with pytest.raises(InvalidValue, match="tolerance"):
        certified_search(None, GIB, 1.0)
