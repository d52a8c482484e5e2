"""One question of a loop's: the answers for its lengths, looked up or searched, with a copy of the training state."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from batchfinder.cache import CacheKey, Store
from batchfinder.loop.key import make_key
from batchfinder.loop.probe import LoopProbe
from batchfinder.loop.setting import Setting
from batchfinder.loop.sizes import TunedBatchSize, TunedBatchSizes
from batchfinder.loop.watch import Watch
from batchfinder.outcome import Shape, Trial
from batchfinder.probe import Probe
from batchfinder.probing.answering import Answering
from batchfinder.probing.clearing import clear
from batchfinder.probing.known import Limits
from batchfinder.probing.memory import Memory
from batchfinder.probing.state import TrainingState

MakeKey = Callable[[Setting, Shape, Any, Memory, Limits], CacheKey]


class Tuning:
    """What one call holds: the probe with its copy of the training state, once there is something to try.

    Args:
        setting: what is tried.
        memory: the device's memory.
        limits: what bounds the search.
        make_key: names all that changes an answer, given a batch of the smallest size as well.
        kind_of_probe: takes the steps of one try.
        guess: the size to try first; None to begin with the smallest.
    """

    def __init__(
        self,
        setting: Setting,
        memory: Memory,
        limits: Limits,
        make_key: MakeKey = make_key,
        kind_of_probe: type[LoopProbe] = LoopProbe,
        guess: int | None = None,
    ) -> None:
        self._setting = setting
        self._memory = memory
        self._limits = limits
        self._make_key = make_key
        self._kind_of_probe = kind_of_probe
        self._guess = guess
        self._free_bytes = memory.free_bytes()
        self._probe: LoopProbe | None = None
        self._held_bytes = 0
        self._froze = False

    def find(
        self,
        shapes: Sequence[Shape],
        store: Store | None,
        on_trial: Callable[[Trial], object] | None = None,
    ) -> TunedBatchSizes:
        """Look the answers up, and search where there is none or it no longer holds.

        Args:
            shapes: one sample's shapes, in the order they are to be tried.
            store: where answers are kept; None to keep none.
            on_trial: called after each try.

        Raises:
            OutOfMemory: not even the smallest size fits.
            Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        """
        setting, limits = self._setting, self._limits
        answering = Answering(
            self._memory,
            limits,
            self._prober,
            setting.target_batch_size,
            setting.min_batch_size,
            setting.multiple_of,
            on_trial,
            hint=lambda shape, usable_bytes: self._guess,
        )
        started = time.perf_counter()
        keys = [] if store is None else self._keys(shapes)
        slots = [None] * len(shapes) if store is None else [store.slot(key, setting.name) for key in keys]
        each = (time.perf_counter() - started) / len(shapes)
        sizes: dict[int | None, TunedBatchSize] = {}
        try:
            for shape, slot in zip(shapes, slots, strict=True):
                found = answering.find(shape, slot)
                sizes[shape.seq_len] = TunedBatchSize(
                    found.outcome,
                    found.plan,
                    self._free_bytes,
                    limits.reserve_bytes,
                    found.seconds + each,
                    found.slot,
                    setting.device.type,
                    setting.asked_by,
                )
        finally:
            self._close()
        return TunedBatchSizes(sizes)

    def _keys(self, shapes: Sequence[Shape]) -> list[CacheKey]:
        """Where the answers are kept. A batch of each shape is made, and the random numbers are put back."""
        # No tensors: a step has not run, and a copy of them would take longer than the look-up.
        untouched = self._capture(left_alone=[torch.Tensor, Optimizer])
        try:
            return [self._key(shape) for shape in shapes]
        finally:
            untouched.restore()

    def _key(self, shape: Shape) -> CacheKey:
        setting = self._setting
        sample = setting.make_batch(setting.smallest, shape.seq_len)
        return self._make_key(setting, shape, sample, self._memory, self._limits)

    def _prober(self, shape: Shape) -> tuple[Probe, int]:
        """The probe, made when it is first needed: it copies the training state."""
        if self._probe is None:
            clear(self._setting.device)
            if gc.get_freeze_count() == 0:
                # A collection after each try then looks at what the tries made, and at nothing else.
                gc.freeze()
                self._froze = True
            before = self._memory.held_bytes()
            state = self._capture()
            self._held_bytes = min(state.nbytes, max(0, self._memory.held_bytes() - before))
            named = self._setting.state
            optimizers = [item for item in named if isinstance(item, Optimizer)]
            watch = Watch(state, [type(item).__name__ for item in named], optimizers, self._setting.made_before)
            reserve = self._limits.reserve_bytes
            self._probe = self._kind_of_probe(self._setting, state, watch, self._memory, reserve, self._held_bytes)
            self._probe.warm_up(shape)
        return self._probe, self._held_bytes

    def _close(self) -> None:
        """Let go of the copy of the training state, and of all memory that is not in use."""
        if self._froze:
            gc.unfreeze()
        if self._probe is not None:
            self._probe = None
            clear(self._setting.device)

    def _capture(self, left_alone: Sequence[Any] = ()) -> TrainingState:
        setting = self._setting
        functions = (setting.train_step, setting.make_batch)
        owners = [owner for owner in (getattr(one, "__self__", None) for one in functions) if owner is not None]
        return TrainingState.capture(*setting.state, *owners, *functions, left_alone=[*left_alone, *setting.left_alone])
