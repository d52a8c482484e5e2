"""Run a step, keep its failure as text, and give its memory back.

A traceback holds the frames of the failed step, and these hold its tensors. So a failure is turned into a verdict and a
text, the traceback is emptied, and only then, outside any `except`, is the memory cleared.
"""

from __future__ import annotations

import ctypes
import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from batchfinder.measure.oom import classify, find_pattern
from batchfinder.results import Verdict

T = TypeVar("T")

_UNSURE = " ({library} says the same of faults other than a full memory.)"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step did not run, in the device's own words; nothing in it keeps the step alive."""

    verdict: Verdict
    message: str


def attempt(step: Callable[[], T], device: str = "cuda") -> T | Failure:
    """Run a step; return what it returns, or how it failed.

    When this returns a failure, no reference is left to the exception, those it was chained to, their tracebacks and
    frames: every tensor that only the failed step knew is dead already, without a garbage collection, unless the user's
    own objects formed a cycle. The step itself should hold nothing that is to die.

    Raises:
        Exception: whatever the step raised that is not about the size, unchanged.
    """
    try:
        return step()
    except Exception as error:
        verdict = classify(error, device=device)
        if verdict is None:
            raise
        failure = Failure(verdict, _words(error))
        _empty(error)
    return failure


def clear(device: torch.device) -> None:
    """Give back all memory that is not in use, on the device and on the host.

    Call it outside any `except` block, after `attempt`. Besides the caching allocator's free segments these go: the
    casts that autocast keeps, and cuBLAS's workspaces, which live in the same pool for good once taken, so that each
    probe counts its own as the first step of a training run does. Peak statistics start anew.

    Raises:
        RuntimeError: the device's context is dead; only a new process can use it again.
    """
    gc.collect()
    torch.clear_autocast_cache()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # Private, but what PyTorch's own CUDA graph trees call; absent from builds without CUDA.
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:
            clear_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type in ("mps", "xpu"):
        getattr(torch, device.type).empty_cache()
    _trim()


def _words(error: BaseException) -> str:
    """The text of the error itself or of the cause that was recognised, with a caveat where the pattern is not sure."""
    cause, pattern = error, find_pattern(error)
    while cause.__cause__ is not None and find_pattern(cause.__cause__) is pattern:
        cause = cause.__cause__
    text = str(cause).strip() or type(cause).__name__
    return text + (_UNSURE.format(library=pattern.library) if pattern is not None and not pattern.sure else "")


def _empty(error: BaseException) -> None:
    """Clear the frames of an exception and of all it is chained to: a frame that holds its own exception is a cycle."""
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        waiting.extend(link for link in (current.__cause__, current.__context__) if link is not None)
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(current.exceptions)
        if current.__traceback__ is not None:
            traceback.clear_frames(current.__traceback__)
            current.__traceback__ = None


def _trim() -> None:
    """Return the free pages of glibc's heap to the system; other C libraries have no such call."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    malloc_trim(0)
