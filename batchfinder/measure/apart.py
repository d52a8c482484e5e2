"""Steps taken in a thread of their own, so that what a failure leaves in the thread ends with it.

oneDNN compiles kernels for each new shape. Where there is no memory left for one, versions up to 3.12 at least remember
the failure for as long as the thread lives: every later kernel that it needs fails with "could not create a primitive",
however much is free by then. A training that goes on in a thread which tried too large a size ends so at its first new
shape, such as an epoch's last, smaller batch. Other threads are not affected.

Source: https://github.com/uxlfoundation/oneDNN/pull/5907; tests/measure/test_apart.py shows it with PyTorch's oneDNN.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

T = TypeVar("T")

_Calls = SimpleQueue[Callable[[], None] | None]

_POLL_SECONDS = 0.2
"""How long a wait may last before it looks whether the other thread was interrupted."""

_here = threading.local()


def apart(steps: Callable[[], T]) -> T:
    """Run steps in a new thread, and return what they return.

    The thread begins with this one's context variables, and records gradients, infers and casts as this one does. Where
    a mode of this thread sees every operator or sets a default device, or where there is no memory for a thread, the
    steps run here. A Ctrl-C is passed on to the steps, and raised here once they have ended.

    Args:
        steps: takes no arguments.

    Raises:
        BaseException: whatever the steps raised, unchanged.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return steps()
    calls: _Calls = SimpleQueue()
    returned: list[T] = []
    raised: list[BaseException] = []
    enter, context, began = _modes(), contextvars.copy_context(), threading.Event()

    def run() -> None:
        began.set()
        _here.calls = calls
        try:
            with ExitStack() as modes:
                enter(modes)
                returned.append(context.run(steps))
        except BaseException as error:
            raised.append(error)
        finally:
            calls.put(None)

    thread = threading.Thread(target=run, name="batchfinder", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # "can't start new thread"
        return steps()
    except KeyboardInterrupt:
        if not began.wait(_POLL_SECONDS):
            raise
        _interrupt(thread)
    _serve(calls, thread)
    _wait_for_its_stack(thread)
    return _result(returned, raised)


def at_home(function: Callable[[], T]) -> T:
    """Call a function in the thread that called `apart`, or here when there is none, and return what it returns.

    For the user's data, which may hold what only the thread that made it may use, such as a connection of sqlite3.

    Args:
        function: takes no arguments.

    Raises:
        BaseException: whatever the function raised, unchanged.
    """
    calls: _Calls | None = getattr(_here, "calls", None)
    if calls is None:
        return function()
    returned: list[T] = []
    raised: list[BaseException] = []
    done = threading.Event()

    def call() -> None:
        try:
            returned.append(function())
        except BaseException as error:
            raised.append(error)
        done.set()

    calls.put(call)
    while not done.wait(_POLL_SECONDS):  # in one long wait no interrupt would arrive
        pass
    return _result(returned, raised)


def _serve(calls: _Calls, thread: threading.Thread) -> None:
    """Make the calls that the thread asks for, until it has ended."""
    while True:
        try:  # around the loop: an interrupt that is flagged in a wait is raised after it, where the loop jumps back
            while thread.is_alive():
                with suppress(Empty):
                    call = calls.get(timeout=_POLL_SECONDS)
                    if call is None:
                        thread.join()
                    else:
                        call()
            return
        except KeyboardInterrupt:
            if not _interrupt(thread):
                raise


def _interrupt(thread: threading.Thread) -> bool:
    """Raise in a thread, between two of its bytecodes, what the interpreter raises in the main thread alone.

    Returns:
        Whether there was such a thread still.
    """
    number, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error))


def _wait_for_its_stack(thread: threading.Thread) -> None:
    """Wait until the system has ended a thread, a moment after Python has: the next one then gets the same stack."""
    task, deadline = Path(f"/proc/self/task/{thread.native_id}"), time.monotonic() + _POLL_SECONDS
    while task.exists() and time.monotonic() < deadline:
        time.sleep(0.0005)


def _result(returned: list[T], raised: list[BaseException]) -> T:
    if raised:
        # Kept in no variable: the error's traceback holds this frame.
        raise raised.pop()
    if not returned:
        raise KeyboardInterrupt  # it came where neither could be noted
    return returned.pop()


def _modes() -> Callable[[ExitStack], None]:
    """What makes another thread compute as this one does; nothing is entered in vain, since nesting has effects."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def enter(modes: ExitStack) -> None:
        if inference:
            modes.enter_context(torch.inference_mode())
        elif not gradients:
            modes.enter_context(torch.no_grad())
        if casts:
            modes.enter_context(torch.autocast("cpu", dtype=dtype))

    return enter
