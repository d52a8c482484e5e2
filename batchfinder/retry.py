"""Retries: a thin wrapper over tenacity, and its only importer.

tenacity raises the last error from inside its own frames, which hold the attempt's state, which holds the error: a
cycle. With `reraise=True` the failed call's locals (a whole training step's tensors, for an out-of-memory) therefore
live until `gc.collect()`. Here an attempt's error is caught in a frame of ours and handed to tenacity as a value, never
as an exception, so the failed call's frames die by reference count: before `between` runs, and again as soon as the
caller has left its `except` block. The traceback shows no frame of tenacity's either.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from batchfinder.errors import InvalidValue

P = ParamSpec("P")
T = TypeVar("T")


def retrying(
    on: type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool] = (OSError,),
    *,
    attempts: int = 3,
    wait: float = 0.1,
    max_wait: float = 5.0,
    between: Callable[[], None] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a decorator that calls a function again when it fails with a transient error.

    Use it as a decorator, or in place: `retrying(attempts=2)(probe)(batch_size, shape)`.

    Args:
        on: the transient errors, or a function that says whether an error is one. Others propagate at once, as does
            anything that is no `Exception`: Ctrl-C is never retried.
        attempts: calls in all, the first included; 1 never retries.
        wait: seconds before the second call; doubled before each one after that.
        max_wait: seconds that a wait never exceeds.
        between: runs before each further call and before the wait, with every frame of the failed call gone.

    Returns:
        A decorator; the decorated function raises the last attempt's own error, unchanged.

    Raises:
        InvalidValue: `attempts` is below 1.
    """
    if attempts < 1:
        raise InvalidValue("attempts", attempts, "at least 1")
    is_transient = (lambda error: isinstance(error, on)) if isinstance(on, type | tuple) else on

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            import tenacity  # 10 ms, and a function may well be decorated and never called

            failed: list[Exception] = []  # the error of the last attempt, while nothing else holds it

            def attempt() -> T | None:
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    failed.append(error)
                    return None

            def pause(seconds: float) -> None:
                failed.clear()
                if between is not None:
                    between()
                time.sleep(seconds)

            answer = tenacity.Retrying(
                retry=lambda state: bool(failed) and is_transient(failed[0]),
                stop=tenacity.stop_after_attempt(attempts),
                wait=tenacity.wait_exponential(multiplier=wait, max=max_wait),
                sleep=pause,
                retry_error_callback=lambda state: state.outcome and state.outcome.result(),
            )(attempt)
            if failed:
                raise failed.pop()
            return cast(T, answer)

        return call

    return decorate
