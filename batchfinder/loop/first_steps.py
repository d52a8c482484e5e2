"""The largest batch size of a generator function, tried on its first steps."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from batchfinder.cache import Store
from batchfinder.errors import InvalidValue
from batchfinder.loop.arguments import limits_of, store_of
from batchfinder.loop.probe import LoopProbe
from batchfinder.loop.setting import Setting
from batchfinder.loop.tuning import Tuning
from batchfinder.outcome import Shape, Trial
from batchfinder.probing.memory import memory_of
from batchfinder.probing.settling import Settling


def largest(
    function: Callable[..., Generator[Any, Any, Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    guess: int,
    max_batch_size: int | None,
    tolerance: float,
    headroom: float | int,
    budget_bytes: int | None,
    cache: str | os.PathLike[str] | Store | bool | None,
    on_trial: Callable[[Trial], object] | None,
) -> int:
    """Find the largest batch size at which the first steps of a function run, and leave no trace.

    Args:
        function: takes a batch size first, and yields after each optimizer step.
        args: what it is called with after the batch size.
        kwargs: what else it is called with.
        device: where it trains.
        guess: the size to try first.
        max_batch_size: the largest size of use.
        tolerance: share of the answer that may be left on the table.
        headroom: memory to leave free: a share, or bytes.
        budget_bytes: the most memory that may be used.
        cache: where answers are kept.
        on_trial: called after each try.

    Raises:
        InvalidValue: it ended within the first steps, or uses what could not be put back.
        OutOfMemory: not even one sample fits.
        Exception: whatever the function raised that is not about the size, unchanged, with all put back.
    """

    def begin(batch_size: int) -> Generator[Any, Any, Any]:
        return function(batch_size, *args, **kwargs)

    begin.__name__ = getattr(function, "__name__", type(function).__name__)
    named = tuple(item for item in (*args, *kwargs.values()) if isinstance(item, nn.Module | Optimizer))
    setting = Setting(
        begin, _size, named, device, None, 1, 1, asked_by="executable_batch_size", made_before=_alive_now()
    )
    memory = memory_of(device, budget_bytes)
    limits = limits_of(memory, headroom, tolerance, max_batch_size, None)
    tuning = Tuning(setting, memory, limits, kind_of_probe=FirstSteps, guess=guess)
    return tuning.find([Shape()], store_of(cache), on_trial).batch_size


class FirstSteps(LoopProbe):
    """Runs a function from its beginning, until each optimizer has stepped twice."""

    def _steps(self, batch_size: int, shape: Shape, settling: Settling) -> None:
        setting = self._setting
        with self._memory.limited(self._reserve_bytes, self._held_bytes), self._watch.watching():
            running = setting.train_step(batch_size)
            assert isinstance(running, Generator)  # that of `begin`
            yields, enough = 0, False
            try:
                for _ in running:
                    yields += 1
                    enough = not self._watch.called()
                    if enough and not settling.goes_on():
                        break
                if not enough:
                    raise InvalidValue(
                        str(getattr(setting.train_step, "__name__", "function")),
                        f"ended after {yields} yield{'s' * (yields != 1)} at batch size {batch_size}",
                        "a yield after each optimizer step, and at least two steps at every size that is tried; "
                        "max_batch_size= bounds them",
                    )
            finally:
                running.close()
            if setting.device.type == "cuda":
                torch.cuda.synchronize(setting.device)


def _size(batch_size: int, seq_len: int | None) -> int:
    """In place of a batch: the function makes its own."""
    return batch_size


def _alive_now() -> Callable[[object], bool]:
    """A function that says of a model or an optimizer whether it is there now."""
    frozen = gc.get_freeze_count() > 0
    if frozen:  # a frozen object is not listed
        gc.unfreeze()
    found = [item for item in gc.get_objects() if issubclass(type(item), nn.Module | Optimizer)]
    if frozen:
        gc.freeze()
    known = {id(item): weakref.ref(item) for item in found}

    def was_there(item: object) -> bool:
        reference = known.get(id(item))
        return reference is not None and reference() is item

    return was_there
