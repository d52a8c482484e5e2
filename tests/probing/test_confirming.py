from __future__ import annotations

import pytest

from batchfinder.outcome import Measurement, Verdict
from batchfinder.probing.confirming import confirmed

FITS = Measurement(Verdict.FITS)
MAY_PASS = [Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY, Verdict.THRASHING]


def _seen(*measurements):
    waiting, events = list(measurements), []

    def probe():
        events.append("probe")
        result = waiting.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return probe, events


@pytest.mark.parametrize("verdict", MAY_PASS)
def test_a_failure_is_tried_again_from_a_clean_slate(verdict):
    """What memory there was may be another's doing: the second try counts."""
    probe, events = _seen(Measurement(verdict), FITS)
    assert confirmed(probe, clean=lambda: events.append("clean")) is FITS
    assert events == ["probe", "clean", "probe"]


@pytest.mark.parametrize("verdict", MAY_PASS)
def test_a_failure_that_comes_twice_is_believed(verdict):
    """After the second, no third."""
    second = Measurement(verdict, message="again")
    probe, events = _seen(Measurement(verdict), second)
    assert confirmed(probe) is second
    assert events == ["probe", "probe"]


@pytest.mark.parametrize("verdict", [Verdict.FITS, Verdict.SIZE_CEILING, Verdict.HEADROOM])
def test_what_cannot_pass_is_believed_at_once(verdict):
    """A size that ran, and a kernel's ceiling, are tried once."""
    probe, events = _seen(Measurement(verdict))
    assert confirmed(probe).verdict is verdict
    assert events == ["probe"]


def test_only_the_errors_that_were_named_are_tried_again():
    """A death may be; a bug is raised at once."""
    probe, _ = _seen(ConnectionError("died"), FITS)
    assert confirmed(probe, again=ConnectionError) is FITS
    probe, events = _seen(KeyError("bug"))
    with pytest.raises(KeyError):
        confirmed(probe, again=ConnectionError)
    assert events == ["probe"]
