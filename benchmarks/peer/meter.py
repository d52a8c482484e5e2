"""What a search makes happen, counted where the work is done and not where the search says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from batchfinder.measure.oom import classify
from benchmarks.peer.kept import Kept


@dataclass
class Counts:
    """What was counted.

    Attributes:
        steps: training steps that were begun.
        tries: the size of each try, in order.
        failed: the sizes that ran out of memory, once for each error.
        again: whether the next step begins a try whatever its size.
    """

    steps: int = 0
    tries: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    again: bool = True


class Meter:
    """Counts steps, tries and out-of-memory errors.

    A try is a run of steps at one size; another size begins a new one, and so does the step after an error.
    """

    def __init__(self) -> None:
        self._kept = Kept(Counts())

    @property
    def counts(self) -> Counts:
        """What was counted so far."""
        return self._kept.value

    def begin(self, batch_size: int) -> None:
        """A step begins.

        Args:
            batch_size: of its batch.
        """
        counts = self.counts
        counts.steps += 1
        if counts.again or counts.tries[-1] != batch_size:
            counts.tries.append(batch_size)
        counts.again = False

    @contextmanager
    def watching(self, device: str) -> Iterator[None]:
        """Note an out-of-memory error that passes through.

        Args:
            device: the type of the device that trains.
        """
        try:
            yield
        except Exception as error:
            counts = self.counts
            if classify(error, device=device) is not None and counts.tries:
                counts.failed.append(counts.tries[-1])
                counts.again = True
            raise
