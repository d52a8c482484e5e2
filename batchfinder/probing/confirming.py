"""A failure is believed when it comes twice, the second time from a clean slate."""

from __future__ import annotations

from collections.abc import Callable

from batchfinder.outcome import Measurement, Verdict
from batchfinder.retry import retrying

_MAY_PASS = (Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY, Verdict.THRASHING)


def confirmed(
    probe: Callable[[], Measurement],
    *,
    clean: Callable[[], None] | None = None,
    again: type[Exception] | tuple[type[Exception], ...] = (),
) -> Measurement:
    """Probe once, and once more where memory ran out: fragments of what ran before, or a neighbour, may be to blame.

    A size ceiling does not depend on what ran before and is believed at once.

    Args:
        probe: tries one size.
        clean: makes the slate clean before the second try.
        again: errors of the first try that call for a second one, such as the death of a child process.

    Returns:
        What the last try saw.
    """
    return retrying(
        again,
        on_result=lambda measurement: measurement.verdict in _MAY_PASS,
        attempts=2,
        wait=0.0,
        between=clean,
    )(probe)()
