"""A failure that nobody expected is believed when it comes twice, the second time from a clean slate."""

from __future__ import annotations

from collections.abc import Callable

from batchfinder.outcome import Measurement
from batchfinder.retry import retrying


def confirmed(probe: Callable[[], Measurement]) -> Measurement:
    """Probe once, and once more where memory ran out. A verdict that cannot pass is believed at once.

    Args:
        probe: tries one size, and clears up after itself.

    Returns:
        What the last try saw.
    """
    return retrying((), on_result=lambda seen: seen.verdict.may_pass, attempts=2, wait=0.0)(probe)()
