"""Whether a size trains: a rehearsal on the user's own trainer, measured, and undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from batchfinder.lightning.rehearsal import Rehearsal
from batchfinder.outcome import Measurement, Shape
from batchfinder.probing.apart import at_home
from batchfinder.probing.memory import Memory
from batchfinder.probing.state import TrainingState
from batchfinder.probing.trying import tried


class Batches(Protocol):
    """Where batches of any size come from; see `lightning/batches.py`."""

    def batch(self, batch_size: int, seq_len: int | None) -> Any:
        """A batch on the host."""
        ...

    def dataset_size(self) -> int | None:
        """Samples in the dataset; None when nobody knows."""
        ...


@dataclass(frozen=True)
class Setting:
    """What is tried, the size aside.

    Attributes:
        stage: `fit`, `validate`, `test` or `predict`.
        target_batch_size: samples per optimizer step, on all devices together; a size that is less than a device's
            part of it is tried with accumulation. None for no target.
        accumulation: what the trainer accumulates where there is no target.
        train: the size and shape that a fit trains with while it validates, and its batches.
        alone: whether the stage runs without a fit.
        num_devices: devices that train side by side.
        split_batch_size: samples of a batch on one device, where batches are split; a size that is less is tried with
            accumulation. None where batches are not split, or nobody can tell.
    """

    stage: str
    target_batch_size: int | None = None
    accumulation: int = 1
    train: tuple[int, Shape, Batches] | None = None
    alone: bool = False
    num_devices: int = 1
    split_batch_size: int | None = None

    def micro_batches(self, batch_size: int) -> int:
        """How many micro-batches of this size to try in one optimizer step: two stand for any number."""
        if self.split_batch_size is not None:
            return 2 if batch_size < self.split_batch_size else 1
        target = self.target_batch_size
        accumulates = self.accumulation > 1 if target is None else batch_size * self.num_devices < target
        return 2 if accumulates else 1


class LightningProbe:
    """Tries a size on the trainer as it stands, and leaves no trace.

    Args:
        rehearsal: how to play the stage.
        setting: what to play.
        batches: where batches come from.
        state: what to put back after each try.
        memory: the device's memory.
        device: where the model is.
        reserve_bytes: to keep free.
        held_bytes: what `state` takes on the device.
        left_out: names of the user's callbacks that take no part.
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self,
        rehearsal: Rehearsal,
        setting: Setting,
        batches: Batches,
        state: TrainingState,
        memory: Memory,
        device: torch.device,
        reserve_bytes: int,
        held_bytes: int,
        left_out: Sequence[str] = (),
    ) -> None:
        self._rehearsal = rehearsal
        self._setting = setting
        self._batches = batches
        self._state = state
        self._memory = memory
        self._device = device
        self._reserve_bytes = reserve_bytes
        self._held_bytes = held_bytes
        self._left_out = left_out

    def warm_up(self, shape: Shape) -> None:
        """Let the process take what it takes once, which would be taken for what samples take. No size is judged by it.

        Args:
            shape: one sample's shape.
        """
        if self._memory.warms_up:
            self(1, shape)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size.

        Args:
            batch_size: samples in the micro-batch.
            shape: one sample's shape.

        Raises:
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        try:
            return tried(
                lambda settling: self._rehearse(batch_size, shape, settling.goes_on),
                self._state,
                self._memory,
                self._device,
            )
        except Exception as error:
            if self._left_out:
                error.add_note(
                    f"Raised while BatchFinder tried batch size {batch_size} without your callbacks "
                    f"{', '.join(self._left_out)}. If the step needs one of them, name it in probe_callbacks=."
                )
            raise

    def _rehearse(self, batch_size: int, shape: Shape, more: Callable[[], bool]) -> None:
        setting = self._setting
        tried = self._feed(self._batches, batch_size, shape)
        limited = self._memory.limited(self._reserve_bytes, self._held_bytes)
        with self._rehearsal.without_the_others(), limited:
            if setting.alone:
                self._rehearsal.evaluate(*tried, more)
            elif setting.train is None:
                self._rehearsal.train(*tried, setting.micro_batches(batch_size), more)
            else:
                train_size, train_shape, batches = setting.train
                self._rehearsal.train(*self._feed(batches, train_size, train_shape), min(2, setting.accumulation), more)
                self._rehearsal.validate_during_fit(*tried, more)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def _feed(self, batches: Batches, batch_size: int, shape: Shape) -> tuple[Callable[[], Any], int]:
        """How to make a batch, and batches per epoch."""
        length = -(-(batches.dataset_size() or 0) // batch_size)
        return lambda: at_home(lambda: batches.batch(batch_size, shape.seq_len)), length
