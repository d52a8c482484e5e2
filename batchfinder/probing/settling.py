"""Whether a size that needed the allocator's cache given back goes on without; see `simulator/settling.py`."""

from __future__ import annotations

from collections.abc import Callable

from batchfinder.simulator.settling import MORE_STEPS


class Settling:
    """Lets a try take more steps until one goes by in which the allocator kept its cache.

    Args:
        retries: says how often the allocator has given back its cache to go on, in all.

    Attributes:
        settled: False once `MORE_STEPS` were taken, each of which gave it back.
    """

    def __init__(self, retries: Callable[[], int]) -> None:
        self._retries = retries
        self._before = self._last = retries()
        self._more = 0
        self.settled = True

    def goes_on(self) -> bool:
        """Ask whether the try needs another step: after those it takes anyway, and after each one more."""
        last, self._last = self._last, self._retries()
        if self._last == last:
            return False
        if self._more == MORE_STEPS:
            self.settled = False
            return False
        self._more += 1
        return True

    def message(self) -> str:
        """What to say of a size that does not settle; empty for one that does.

        Steps that never asked have not settled either, where the cache was given back.
        """
        if self.settled and not self.goes_on():
            return ""
        times = self._last - self._before
        return f"it ran, but only by giving back all cached memory {'once' if times == 1 else f'{times} times'}"
