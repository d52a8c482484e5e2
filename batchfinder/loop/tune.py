"""One question of a loop's: the answers for its lengths, looked up or searched, with a copy of the training state.

Finding the largest batch size for a training loop of one's own.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from batchfinder.cache import CacheKey, Store
from batchfinder.loop.cache_key import make_key
from batchfinder.loop.options import (
    Setting,
    budget_of,
    check_alone,
    check_sizes,
    device_of,
    headroom_of,
    limits_of,
    store_of,
)
from batchfinder.loop.probe import LoopProbe, Watch
from batchfinder.loop.result import TunedBatchSize, TunedBatchSizes
from batchfinder.measure.cleanup import clear
from batchfinder.measure.device_memory import Memory, memory_of
from batchfinder.measure.tuner import SearchLimits, Tuner
from batchfinder.probe import Probe
from batchfinder.results import Shape, Trial
from batchfinder.snapshot.training_state import TrainingState

MakeKey = Callable[[Setting, Shape, Any, Memory, SearchLimits], CacheKey]


class LoopTuner:
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
        limits: SearchLimits,
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
        answering = Tuner(
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


def tune_batch_size(
    train_step: Callable[[Any], object],
    make_batch: Callable[[int, int | None], Any],
    state: Any,
    *,
    device: torch.device | str | None = None,
    seq_lens: Sequence[int] | None = None,
    target_batch_size: int | None = None,
    headroom: float | int | str = 0.0,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    tolerance: float = 0.01,
    budget: int | str | None = None,
    cache: str | os.PathLike[str] | Store | bool | None = None,
    on_trial: Callable[[Trial], object] | None = None,
) -> TunedBatchSizes:
    """Find the largest batch size that a training step of one's own runs at, and leave no trace.

    Sizes are tried with `train_step` itself: at least twice each, and until each optimizer in `state` has stepped
    twice. After each try everything is put back, down to the random numbers, however it ended: training is bit for bit
    what it would be without. A later start of the same program looks the answer up and tries nothing; where less memory
    is free than when it was found, it is tried once.

    Args:
        train_step: takes a whole optimizer step, as the loop does: forward, loss, backward, step, zero_grad. Without
            a target it is called as `train_step(batch)`. With one it is called as `train_step(micro_batches)`, with an
            iterable of the micro-batches of one optimizer step, whose `len()` is how many there are; it should go
            through all of them and step once. What it prints or writes to files stays.
        make_batch: `make_batch(batch_size, seq_len)` returns a batch as the loader would; `seq_len` is None for data
            of one fixed shape.
        state: all that `train_step` changes, in a list or tuple: models, optimizers, schedulers, scalers, averages of
            weights, counters; any object will do. What can be reached from these, from variables of closures, and
            from the objects that bound methods belong to, need not be named. Module-level names cannot be reached.
        device: `cpu`, `cuda` or `cuda:N`; None for where the model is.
        seq_lens: lengths to find sizes for, the longest first; None for data of one fixed shape.
        target_batch_size: samples per optimizer step, made up of micro-batches that fit; None for no target.
        headroom: memory to leave free: a share of what training could take (0.05 or `5%`), or bytes (an int or `1GiB`).
        min_batch_size: no smaller size is tried; 2 for a step that fails with a single sample, as BatchNorm may.
        max_batch_size: no larger size is tried.
        multiple_of: every size tried is a multiple of this.
        tolerance: share of the answer that may be left on the table for fewer tries; 0 for the exact maximum.
        budget: the most memory that may be used, in bytes or as `12GiB`; on a CPU, resident memory of the process.
        cache: where answers are kept (a path, an fsspec URL, a `Store`); None or True for the default place, False for
            none.
        on_trial: called after each try with the trial, for a line of progress.

    Returns:
        What was found, by length.

    Raises:
        InvalidValue: an argument cannot be meant, or `train_step` changes what could not be put back.
        OutOfMemory: not even the smallest size fits; the text says what to do.
        Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
    """
    check_sizes(seq_lens, target_batch_size, min_batch_size, max_batch_size, multiple_of, tolerance)
    check_alone()
    share = headroom_of(headroom)
    named = tuple(state) if isinstance(state, list | tuple) else (state,)
    where = device_of(device, named)
    setting = Setting(train_step, make_batch, named, where, target_batch_size, min_batch_size, multiple_of)
    memory = memory_of(where, budget_of(budget))
    limits = limits_of(memory, share, tolerance, max_batch_size, target_batch_size)
    shapes = [Shape(seq_len) for seq_len in (sorted(set(seq_lens), reverse=True) if seq_lens else [None])]
    return LoopTuner(setting, memory, limits).find(shapes, store_of(cache), on_trial)
