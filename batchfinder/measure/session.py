"""What the trials of one search share: a copy of the training state, put back after each of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import TracebackType

import torch

from batchfinder.measure.cleanup import clear
from batchfinder.measure.device_memory import Memory
from batchfinder.snapshot.training_state import TrainingState


class TrialSession:
    """A copy of the training state, made when something is tried for the first time, and let go of at the end.

    Args:
        memory: the device's memory.
        device: where the model is.
        reserve_bytes: to keep free.
        capture: copies the training state.

    Attributes:
        held_bytes: what the copy takes on the device, which training will not have; 0 before.
    """

    def __init__(
        self, memory: Memory, device: torch.device, reserve_bytes: int, capture: Callable[[], TrainingState]
    ) -> None:
        self.memory = memory
        self.device = device
        self.reserve_bytes = reserve_bytes
        self.held_bytes = 0
        self._capture = capture
        self._state: TrainingState | None = None
        self._start_bytes = 0
        self._froze = False

    def __enter__(self) -> TrialSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> TrainingState:
        """Return the copy; the first call makes it."""
        if self._state is None:
            clear(self.device)
            if gc.get_freeze_count() == 0:
                # The collection after each trial then looks at what the trials made alone: 250 ms less.
                gc.freeze()
                self._froze = True
            before = self.memory.held_bytes()
            self._state = self._capture()
            self._start_bytes = self.memory.held_bytes()
            self.held_bytes = min(self._state.nbytes, max(0, self._start_bytes - before))
        return self._state

    def max_peak_bytes(self) -> int:
        """What a peak may come to now: the limit, less the headroom and what earlier trials have left behind."""
        self.open()
        left_bytes = max(0, self.memory.held_bytes() - self._start_bytes)
        return max(1, self.memory.max_peak_bytes(self.held_bytes - left_bytes) - self.reserve_bytes)

    def close(self) -> None:
        """Let go of the copy, and of all memory that is not in use."""
        if self._froze:
            gc.unfreeze()
            self._froze = False
        if self._state is not None:
            self._state = None
            clear(self.device)
