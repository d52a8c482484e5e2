"""A decorator that calls a function with a batch size it runs at: accelerate's contract, with the cache."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from batchfinder.cache import CacheEntry, Store
from batchfinder.cache.validity import outgrown
from batchfinder.errors import CacheFailed, InvalidValue, OutOfMemory
from batchfinder.loop.options import LoopConfig, check_single_process, device_of, warn_not_cached
from batchfinder.loop.tune import make_key
from batchfinder.measure.device_memory import memory_of
from batchfinder.measure.options import store_of
from batchfinder.measure.trial import Failure, attempt, clear
from batchfinder.measure.tuner import SearchLimits
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict

F = TypeVar("F", bound=Callable[..., Any])


@overload
def executable_batch_size(function: F) -> F: ...
@overload
def executable_batch_size(
    function: None = None,
    *,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    device: torch.device | str | None = None,
    cache: str | os.PathLike[str] | Store | bool | None = None,
) -> Callable[[F], F]: ...
def executable_batch_size(
    function: Any = None,
    *,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    device: torch.device | str | None = None,
    cache: str | os.PathLike[str] | Store | bool | None = None,
) -> Any:
    """Decorate a function that trains, so that it gets a batch size that runs as its first argument.

    The function is called with `starting_batch_size`, or with the size that ran the last time, from the cache. Each
    time it runs out of memory, the memory is cleared and it is called again with half the size, as
    `accelerate.utils.find_executable_batch_size` does with a tenth less. A larger size is never tried: a function that
    returns has trained. The size at which it returned is cached, and is where a later call begins.

    Args:
        function: takes a batch size first; the decorated function is called without it.
        starting_batch_size: the size to begin with.
        reduce_batch_size_fn: returns the next, smaller size after an out-of-memory error, as in accelerate; None to
            halve.
        device: where it trains; None for a CUDA device where there is one, else the CPU.
        cache: where the size that ran is cached (a path, an fsspec URL, a `Store`); None or True for the default place,
            False for no cache.

    Raises:
        TypeError: the decorated function was called with a batch size.
        InvalidValue: an argument has an invalid value, or the function is a method, a generator function, or takes no
            batch size by position.
        OutOfMemory: no size runs.
        Exception: whatever the function raised that is not about the size, unchanged.

    Example:
        >>> @executable_batch_size(starting_batch_size=4, cache=False)
        ... def train(batch_size, samples):
        ...     return [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]
        >>> train([1, 2, 3, 4, 5])
        [[1, 2, 3, 4], [5]]
    """
    if starting_batch_size < 1:
        raise InvalidValue("starting_batch_size", starting_batch_size, "a size of at least 1")

    store = store_of(cache)

    def decorate(function: Any) -> Any:
        _check_function(function)
        name, signature = _name(function), inspect.signature(function)
        ran_at = 0  # the last time; 0 before
        entry: CacheEntry | None = None
        free_bytes = 0

        def binds(*args: Any, **kwargs: Any) -> bool:
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                return False
            return True

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran_at, entry, free_bytes
            if not binds(0, *args, **kwargs):
                if binds(*args, **kwargs):
                    rest = [*map(repr, args[1:]), *(f"{key}={value!r}" for key, value in kwargs.items())]
                    raise TypeError(
                        f"{name} was called with a batch size, which the decorator passes itself. Call it without: "
                        f"{name}({', '.join(rest)})"
                    )
                signature.bind(0, *args, **kwargs)  # says what is wrong
            check_single_process()
            where = device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"), ())
            clear(where)
            if ran_at == 0 and store is not None:
                entry, free_bytes = _entry(function, args, kwargs, where, starting_batch_size, store)
                try:
                    known = None if entry is None else entry.get()
                except CacheFailed as error:
                    warn_not_cached(error)
                    known = None
                # Where more memory is free now, a larger size may run.
                ran_at = 0 if known is None or outgrown(known, free_bytes) else known.max_batch_size
            size, failed = ran_at or starting_batch_size, []
            while True:
                done = attempt(functools.partial(function, size, *args, **kwargs), where.type)
                if not isinstance(done, Failure):
                    break
                clear(where)
                failed.append(Trial(size, Shape(), Measurement(done.verdict, message=done.message)))
                smaller = size // 2 if reduce_batch_size_fn is None else reduce_batch_size_fn()
                if smaller < 1:
                    advice = "try a smaller model or a lower precision."
                    raise OutOfMemory(size, f"{done.message.rstrip('.')}. {name} ran at no batch size; {advice}")
                if smaller >= size:
                    expected = f"a function that returns a size below {size}"
                    raise InvalidValue("reduce_batch_size_fn", smaller, expected)
                again = f"and is called again with {smaller}: {done.message}"
                warnings.warn(f"{name} ran out of memory at batch size {size} {again}", stacklevel=2)
                size = smaller
            if entry is not None and size != ran_at:
                stop, ran = StopReason.TOLERANCE if failed else StopReason.CAP, Measurement(Verdict.FITS)
                trials = (*failed, Trial(size, Shape(), ran))
                try:
                    entry.put(SearchResult(Shape(), size, stop, ran, trials, free_bytes=free_bytes))
                except CacheFailed as error:
                    warn_not_cached(error)
            ran_at = size
            return done

        return called

    return decorate if function is None else decorate(function)


def _entry(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, starting_size: int, store: Store
) -> tuple[CacheEntry | None, int]:
    """Where the size is cached, by the function's code and what it is given; and what memory is free."""
    given = [*args, *kwargs.values()]
    state = tuple(item for item in given if isinstance(item, nn.Module | Optimizer))
    config = LoopConfig(function, _no_batch, state, device, "executable_batch_size")
    try:
        memory = memory_of(device, None)
        free_bytes = memory.free_bytes()
    except InvalidValue:  # this system does not say what is free
        return None, 0
    # Half of the size that failed may be left on the table.
    limits = SearchLimits(max_batch_size=starting_size, tolerance=0.5)
    key = make_key(config, Shape(), (args, kwargs), memory, limits)
    plain = [item if isinstance(item, bool | int | str) else None for item in given]
    return store.entry(replace(key, extra={**key.extra, "given": plain}), config.label), free_bytes


def _check_function(function: Any) -> None:
    """Refuse, as it is decorated, what cannot be called with a batch size in the first place."""
    name, parameters = _name(function), [*inspect.signature(function).parameters.values()]
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        expected = "a function that returns when it has trained; to search for the largest size, use tune_batch_size"
        raise InvalidValue("function", name, expected)
    first = parameters[0] if parameters else None
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise InvalidValue("function", name, "a function whose first argument, given by position, is the batch size")
    if first.name in ("self", "cls"):
        expected = f"a function; within the method, define one that takes the batch size first and uses {first.name}"
        raise InvalidValue("function", name, expected)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _no_batch(batch_size: int, seq_len: int | None) -> None:
    """In place of a batch: the function makes its own."""
