"""A decorator that calls a function with a batch size it runs at, in the style of accelerate's."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from batchfinder.cache import Store
from batchfinder.errors import InvalidValue, OutOfMemory
from batchfinder.loop.arguments import budget_of, check_alone, check_sizes, device_of, headroom_of
from batchfinder.loop.first_steps import largest
from batchfinder.outcome import Trial
from batchfinder.probing.clearing import Failure, attempt, clear

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
