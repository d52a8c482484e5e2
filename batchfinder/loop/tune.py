"""Finding the largest batch size for a training loop of one's own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from batchfinder.cache import CacheKey, Store
from batchfinder.loop.arguments import check_alone, check_sizes, device_of, headroom_of
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
from batchfinder.probing.memory import Memory, memory_of
from batchfinder.probing.state import TrainingState
from batchfinder.units import parse_bytes


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
    memory = memory_of(where, None if budget is None else parse_bytes(str(budget), option="budget"))
    free = memory.free_bytes()
    reserve = share if isinstance(share, int) else int(share * free)
    caps = [cap for cap in (max_batch_size, target_batch_size) if cap is not None]
    limits = Limits(min(caps, default=None), tolerance, reserve, share)
    tuning = _Tuning(setting, memory, limits)
    answering = Answering(memory, limits, tuning.prober, target_batch_size, min_batch_size, multiple_of, on_trial)
    shapes = [Shape(seq_len) for seq_len in (sorted(set(seq_lens), reverse=True) if seq_lens else [None])]
    store = _store(cache)
    started = time.perf_counter()
    keys = [] if store is None else tuning.keys(shapes)
    slots = [None] * len(shapes) if store is None else [store.slot(key, setting.name) for key in keys]
    each = (time.perf_counter() - started) / len(shapes)
    sizes: dict[int | None, TunedBatchSize] = {}
    try:
        for shape, slot in zip(shapes, slots, strict=True):
            found = answering.find(shape, slot)
            seconds = found.seconds + each
            sizes[shape.seq_len] = TunedBatchSize(
                found.outcome, found.plan, free, reserve, seconds, found.slot, where.type
            )
    finally:
        tuning.close()
    return TunedBatchSizes(sizes)


class _Tuning:
    """What one call holds: the probe with its copy of the training state, once there is something to try."""

    def __init__(self, setting: Setting, memory: Memory, limits: Limits) -> None:
        self._setting = setting
        self._memory = memory
        self._limits = limits
        self._probe: LoopProbe | None = None
        self._held_bytes = 0
        self._froze = False

    def keys(self, shapes: list[Shape]) -> list[CacheKey]:
        """Where the answers are kept. A batch of each shape is made, and the random numbers are put back."""
        # No tensors: a step has not run, and a copy of them would take longer than the look-up.
        untouched = self._capture(left_alone=[torch.Tensor, Optimizer])
        try:
            samples = (self._setting.make_batch(self._setting.smallest, shape.seq_len) for shape in shapes)
            return [
                make_key(self._setting, shape, sample, self._memory, self._limits)
                for shape, sample in zip(shapes, samples, strict=True)
            ]
        finally:
            untouched.restore()

    def prober(self, shape: Shape) -> tuple[Probe, int]:
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
            watch = Watch(state, [type(item).__name__ for item in named], optimizers)
            reserve = self._limits.reserve_bytes
            self._probe = LoopProbe(self._setting, state, watch, self._memory, reserve, self._held_bytes)
            self._probe.warm_up(shape)
        return self._probe, self._held_bytes

    def close(self) -> None:
        """Let go of the copy of the training state, and of all memory that is not in use."""
        if self._froze:
            gc.unfreeze()
        if self._probe is not None:
            self._probe = None
            clear(self._setting.device)

    def _capture(self, left_alone: Sequence[Any] = ()) -> TrainingState:
        functions = (self._setting.train_step, self._setting.make_batch)
        owners = [owner for owner in (getattr(one, "__self__", None) for one in functions) if owner is not None]
        return TrainingState.capture(*self._setting.state, *owners, *functions, left_alone=left_alone)


def _store(cache: str | os.PathLike[str] | Store | bool | None) -> Store | None:
    if cache is False:
        return None
    if isinstance(cache, Store):
        return cache
    return Store(None if cache is True else cache)
