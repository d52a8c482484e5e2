"""The largest batch size of a generator function, tried on its first steps.

A decorator that calls a function with a batch size it runs at, in the style of accelerate's.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Generator
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from batchfinder.cache import Store
from batchfinder.errors import InvalidValue, OutOfMemory
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
from batchfinder.loop.probe import LoopProbe
from batchfinder.loop.tune import LoopTuner
from batchfinder.measure.cleanup import Failure, attempt, clear
from batchfinder.measure.device_memory import memory_of
from batchfinder.measure.trial import SteadyStateCheck
from batchfinder.results import Shape, Trial


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
    tuning = LoopTuner(setting, memory, limits, kind_of_probe=FirstSteps, guess=guess)
    return tuning.find([Shape()], store_of(cache), on_trial).batch_size


class FirstSteps(LoopProbe):
    """Runs a function from its beginning, until each optimizer has stepped twice."""

    def _steps(self, batch_size: int, shape: Shape, settling: SteadyStateCheck) -> None:
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


F = TypeVar("F", bound=Callable[..., Any])

LEFT = 0.9
"""Share of a batch size to go on with where it did not run, as in accelerate."""


@overload
def executable_batch_size(function: F) -> F: ...
@overload
def executable_batch_size(
    function: None = None,
    *,
    starting_batch_size: int = 128,
    max_batch_size: int | None = None,
    device: torch.device | str | None = None,
    tolerance: float = 0.01,
    headroom: float | int | str = 0.0,
    budget: int | str | None = None,
    cache: str | os.PathLike[str] | Store | bool | None = None,
    on_trial: Callable[[Trial], object] | None = None,
) -> Callable[[F], F]: ...
def executable_batch_size(
    function: Any = None,
    *,
    starting_batch_size: int = 128,
    max_batch_size: int | None = None,
    device: torch.device | str | None = None,
    tolerance: float = 0.01,
    headroom: float | int | str = 0.0,
    budget: int | str | None = None,
    cache: str | os.PathLike[str] | Store | bool | None = None,
    on_trial: Callable[[Trial], object] | None = None,
) -> Any:
    """Decorate a function that trains, so that it gets a batch size that runs as its first argument.

    A function is called with `starting_batch_size`. Each time it runs out of memory, the memory is cleared and it is
    called again with a tenth less, as `accelerate.utils.find_executable_batch_size` does. It is never called for the
    sake of a larger size, since nobody knows what it does outside: a function that returns has run once to its end.

    A *generator function*, one with a `yield` after each optimizer step, is searched upwards too: the largest size is
    found on its first two steps, from `starting_batch_size` up and down, and then it runs to its end with that size.
    What it returns is what the decorated function returns. Tries leave no trace in what it is given or refers to by
    its closure; a model or optimizer that it makes itself goes with the try. What it prints or writes to files before
    its second `yield` is written by each try. The answer is kept in the cache.

    The size that ran is where a later call begins.

    Args:
        function: takes a batch size first; the decorated function is called without it.
        starting_batch_size: the size to begin with.
        max_batch_size: no larger size is tried; the number of samples, for one.
        device: where it trains; None for a CUDA device where there is one, else the CPU.
        tolerance: share of the answer that may be left on the table for fewer tries; 0 for the exact maximum.
        headroom: memory to leave free while sizes are tried: a share (0.05 or `5%`), or bytes (an int or `1GiB`).
        budget: the most memory that may be used while sizes are tried, in bytes or as `12GiB`.
        cache: where answers are kept; None or True for the default place, False for none.
        on_trial: called after each try of a search with the trial.

    Raises:
        TypeError: the decorated function was called with a batch size.
        InvalidValue: an argument cannot be meant, or a try would leave a trace.
        OutOfMemory: no size runs.
        Exception: whatever the function raised that is not about the size, unchanged.

    Example:
        >>> @executable_batch_size(starting_batch_size=4, max_batch_size=8)
        ... def train(batch_size, samples):
        ...     return [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]
        >>> train([1, 2, 3, 4, 5])
        [[1, 2, 3, 4], [5]]
    """
    if starting_batch_size < 1:
        raise InvalidValue("starting_batch_size", starting_batch_size, "a size of at least 1")
    check_sizes(None, None, 1, max_batch_size, 1, tolerance)
    share, budget_bytes = headroom_of(headroom), budget_of(budget)

    def decorate(function: Any) -> Any:
        size = starting_batch_size if max_batch_size is None else min(starting_batch_size, max_batch_size)
        searches = inspect.isgeneratorfunction(function)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal size, searches
            _check_call(function, args, kwargs)
            check_alone()
            where = device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"), ())
            clear(where)
            if searches:
                size = largest(
                    function, args, kwargs, where, size, max_batch_size, tolerance, share, budget_bytes, cache, on_trial
                )
                searches = False
            while True:
                done = attempt(functools.partial(_run, function, size, args, kwargs), where.type)
                if not isinstance(done, Failure):
                    return done
                clear(where)
                size = _smaller(function, size, done.message)

        return called

    return decorate if function is None else decorate(function)


def _run(function: Callable[..., Any], size: int, args: Any, kwargs: Any) -> Any:
    """Run to the end, and return what is returned."""
    result = function(size, *args, **kwargs)
    if not inspect.isgenerator(result):
        return result
    while True:
        try:
            next(result)
        except StopIteration as end:
            return end.value


def _smaller(function: Any, size: int, words: str) -> int:
    """A size to go on with."""
    lower, name = int(LEFT * size), _name(function)
    if lower < 1:
        raise OutOfMemory(
            size, f"{words.rstrip('.')}. {name} ran at no batch size; try a smaller model or a lower precision."
        )
    warnings.warn(
        f"{name} ran out of memory at batch size {size} and is called again with {lower}: {words}", stacklevel=3
    )
    return lower


def _check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a call that passes the batch size from other wrong calls."""
    signature, name = inspect.signature(function), _name(function)
    if _binds(signature, 0, *args, **kwargs) or not _binds(signature, *args, **kwargs):
        signature.bind(0, *args, **kwargs)  # says what is wrong
        return
    rest = [*map(repr, args[1:]), *(f"{key}={value!r}" for key, value in kwargs.items())]
    raise TypeError(
        f"{name} was called with a batch size, which the decorator passes itself. Call it without: "
        f"{name}({', '.join(rest)})"
    )


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
