"""What the stages of the steps tell of a size beside its peak: it shows a search the way where the peak is flat."""

from __future__ import annotations

from collections.abc import Callable


class Readings:
    """Listens to `Step.run` and reads the memory as stages begin.

    At small sizes a step's peak is the optimizer's, whatever the size. These two are not: what stays between steps is
    where the peaks of large sizes begin, and the first forward takes nearly what a sample adds to them.

    Args:
        held: bytes held now, counted as peaks are.
        peak: the most bytes held so far.

    Attributes:
        resting_bytes: held as the last micro-batch of a later step begins; None before.
        forward_bytes: the most the first forward, loss included, took beyond what was held before; None before.
    """

    def __init__(self, held: Callable[[], int], peak: Callable[[], int]) -> None:
        self._held = held
        self._peak = peak
        self._before_bytes: int | None = None
        self.resting_bytes: int | None = None
        self.forward_bytes: int | None = None

    def __call__(self, step: int, stage: str, micro_batch: int) -> None:
        """Told by `Step.run` as each stage begins.

        Args:
            step: which optimizer step, from 0.
            stage: `batch`, `forward`, `loss`, `backward` or another.
            micro_batch: which micro-batch of the step, from 0.
        """
        if stage == "batch" and step == 0 and micro_batch == 0:
            self._before_bytes = self._held()
        elif stage == "batch" and step > 0:
            self.resting_bytes = self._held()
        elif stage == "backward" and step == 0 and micro_batch == 0 and self._before_bytes is not None:
            self.forward_bytes = max(0, self._peak() - self._before_bytes)
