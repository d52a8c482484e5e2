"""What a process on the stub tells the one that started it: lines of a file, its peaks among them as it ends."""

from __future__ import annotations

import atexit
import contextlib
import os

import torch

from batchfinder.cuda_stub.card import VARIABLE

_telling = os.getpid()


def tells() -> bool:
    """Whether this process tells as it ends; its forks do not, but for those that are asked to."""
    return os.getpid() == _telling


def tell_as_well() -> None:
    """Have this fork tell as it ends."""
    global _telling
    _telling = os.getpid()


def _path() -> str | None:
    setting = os.environ.get(VARIABLE, "").partition("|")[0]
    pairs = dict(pair.partition("=")[::2] for pair in setting.split(";"))
    return os.path.join(pairs["folder"], "events") if pairs.get("folder") else None


def write_event(kind: str, words: str) -> None:
    """Add a line to the events."""
    path = _path()
    if path is not None:
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{kind} {os.getpid()} {words}\n")


def _tell_peaks() -> None:
    """Write what this process has reserved at most on each card, since that was last reset."""
    if not tells() or not torch.cuda.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # the context is dead
        for device in range(torch.cuda.device_count()):
            write_event("peak", f"{torch.cuda.max_memory_reserved(device)} {device}")


atexit.register(_tell_peaks)
