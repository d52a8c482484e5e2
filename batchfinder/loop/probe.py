"""Whether a size trains: the user's own step, taken, measured, and undone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from batchfinder.errors import InvalidValue
from batchfinder.loop.micro_batches import MicroBatches
from batchfinder.loop.setting import Setting
from batchfinder.loop.watch import MOST_CALLS, Watch
from batchfinder.outcome import Measurement, Shape
from batchfinder.probing.apart import at_home
from batchfinder.probing.memory import Memory
from batchfinder.probing.settling import Settling
from batchfinder.probing.state import TrainingState
from batchfinder.probing.trying import tried


class LoopProbe:
    """Tries a size with a step of the user's, and leaves no trace.

    Args:
        setting: what is tried.
        state: what to put back after each try.
        watch: counts the optimizers' steps.
        memory: the device's memory.
        reserve_bytes: to keep free.
        held_bytes: what `state` takes on the device.
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self, setting: Setting, state: TrainingState, watch: Watch, memory: Memory, reserve_bytes: int, held_bytes: int
    ) -> None:
        self._setting = setting
        self._state = state
        self._watch = watch
        self._memory = memory
        self._reserve_bytes = reserve_bytes
        self._held_bytes = held_bytes
        self._warned = False

    def warm_up(self, shape: Shape) -> None:
        """Let the process take what it takes once, which would be taken for what samples take. No size is judged by it.

        Args:
            shape: one sample's shape.
        """
        if self._memory.warms_up:
            self(self._setting.smallest, shape)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size.

        Args:
            batch_size: samples in the micro-batch.
            shape: one sample's shape.

        Raises:
            InvalidValue: the step uses something that could not be put back, or leaves micro-batches out.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        try:
            seen = tried(
                lambda settling: self._steps(batch_size, shape, settling),
                self._state,
                self._memory,
                self._setting.device,
            )
        except InvalidValue:
            raise
        except Exception as error:
            at = "" if shape.seq_len is None else f" at seq_len {shape.seq_len}"
            error.add_note(f"Raised while {self._setting.asked_by} tried batch size {batch_size}{at}.")
            if "MicroBatches" in str(error):
                error.add_note(
                    "With target_batch_size, train_step is given an iterable of the micro-batches of one optimizer "
                    "step, whose length is how many there are."
                )
            raise
        if self._watch.idle and not self._warned:
            self._warned = True
            warnings.warn(
                f"{', '.join(self._watch.idle)} did not step in {MOST_CALLS} calls of train_step, so sizes are tried "
                "without the memory its steps take. train_step should take a whole optimizer step; leave the optimizer "
                "out of state= if it is not meant to step.",
                stacklevel=2,
            )
        return seen

    def _steps(self, batch_size: int, shape: Shape, settling: Settling) -> None:
        setting = self._setting
        # As in a loop, a batch lives until the next one has been made.
        with self._memory.limited(self._reserve_bytes, self._held_bytes), self._watch.watching():
            accumulates = setting.target_batch_size is not None
            for given in (self._windows if accumulates else self._batches)(batch_size, shape):
                setting.train_step(given)
                if accumulates:
                    self._check_all_taken(given)
                if not self._watch.called() and not settling.goes_on():
                    break
            if setting.device.type == "cuda":
                torch.cuda.synchronize(setting.device)

    def _batches(self, batch_size: int, shape: Shape) -> Iterator[Any]:
        while True:
            yield at_home(lambda: self._setting.make_batch(batch_size, shape.seq_len))

    def _windows(self, batch_size: int, shape: Shape) -> Iterator[MicroBatches]:
        while True:
            yield MicroBatches(lambda: self._batches(batch_size, shape), self._setting.micro_batches(batch_size))

    def _check_all_taken(self, micro_batches: MicroBatches) -> None:
        if micro_batches.given < len(micro_batches):
            train_step = self._setting.train_step
            raise InvalidValue(
                "train_step",
                getattr(train_step, "__qualname__", type(train_step).__qualname__),
                f"a function that goes through all {len(micro_batches)} micro-batches it is given, "
                f"not {micro_batches.given}",
            )
