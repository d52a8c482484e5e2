from __future__ import annotations

import pytest

from batchfinder.outcome import Measurement, Verdict
from batchfinder.probing.confirming import confirmed

FITS = Measurement(Verdict.FITS)
MAY_PASS = [Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY]


def _seen(*measurements):
    waiting, tries = list(measurements), []

    def probe():
        tries.append(len(waiting))
        return waiting.pop(0)

    return probe, tries


@pytest.mark.parametrize("verdict", MAY_PASS)
def test_a_failure_is_tried_again(verdict):
    """What memory there was may be another's doing: the second try counts."""
    probe, tries = _seen(Measurement(verdict), FITS)
    assert confirmed(probe) is FITS
    assert len(tries) == 2


@pytest.mark.parametrize("verdict", MAY_PASS)
def test_a_failure_that_comes_twice_is_believed(verdict):
    """After the second, no third."""
    second = Measurement(verdict, message="again")
    probe, tries = _seen(Measurement(verdict), second)
    assert confirmed(probe) is second
    assert len(tries) == 2


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict not in MAY_PASS])
def test_what_cannot_pass_is_believed_at_once(verdict):
    """A size that ran, a kernel's ceiling, and what was seen to recur step after step, are tried once."""
    probe, tries = _seen(Measurement(verdict))
    assert confirmed(probe).verdict is verdict
    assert len(tries) == 1
