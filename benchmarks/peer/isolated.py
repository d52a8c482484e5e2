"""A process for each measurement: a crash or a hang costs that one alone, and every search starts from the same slate.

On the CPU it is a fork, which costs nothing: what is imported is there already. CUDA cannot be used in a fork.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Failed(Exception):
    """A measurement did not come to its end; the text says why."""


def isolated(function: Callable[..., Any], *arguments: Any, seconds: float, device: str = "cpu") -> Any:
    """Call a function in a process of its own, silently, and return what it returns.

    Args:
        function: what to call; for CUDA a module's own function.
        arguments: its arguments.
        seconds: what it may take.
        device: `cpu` for a fork, `cuda` for a fresh process.

    Raises:
        Failed: it raised, died, or took too long.
    """
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(there, function, arguments))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            raise Failed(f"ended after {seconds:g} s")
        answer, error = here.recv()
    except EOFError:
        process.join()
        raise Failed(f"the process died ({process.exitcode})") from None
    finally:
        process.kill()
        process.join()
        here.close()
    if error is not None:
        raise Failed(error)
    return answer


def _call(there: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        there.send((function(*arguments), None))
    except BaseException as error:
        there.send((None, f"{type(error).__name__}: {error}".partition("\n")[0][:200]))
