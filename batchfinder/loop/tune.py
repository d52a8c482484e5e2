"""Finding the largest batch size for a training loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from batchfinder.cache import Store
from batchfinder.loop.arguments import budget_of, check_alone, check_sizes, device_of, headroom_of, limits_of, store_of
from batchfinder.loop.setting import Setting
from batchfinder.loop.sizes import TunedBatchSizes
from batchfinder.loop.tuning import Tuning
from batchfinder.outcome import Shape, Trial
from batchfinder.probing.memory import memory_of


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
    return Tuning(setting, memory, limits).find(shapes, store_of(cache), on_trial)
