"""Recognising out of memory: errors, and the last words of a process that died, are looked up in `oom_patterns.py`.

What is not in that table is a bug or a choice of the user's, and propagates unchanged. So do, on purpose:

- an error that merely speaks of memory;
- `CUDA error: too many resources requested for launch` and `device kernel image is invalid`, which a kernel says at any
  batch size on a GPU it was not built for;
- `CUDA error: an illegal memory access was encountered`: kernels with 32-bit offsets fail so on tensors beyond 2**31
  elements, but so does any other bug of a kernel, and the process can do nothing more on its GPU.
"""

from __future__ import annotations

import errno
import re
import signal

from batchfinder.errors import ProbeDied
from batchfinder.measure.oom_patterns import MESSAGES, TYPES, OOMPattern
from batchfinder.results import Measurement, Verdict
from batchfinder.training.child_process import ChildDied


def classify(error: BaseException, *, device: str = "cuda") -> Verdict | None:
    """Say what an error raised by a training step means for the size it ran at.

    A library that catches an out-of-memory and raises its own error `from` it (`__cause__`) has still run out of
    memory. An error raised by chance while another was handled (`__context__` alone) is judged for itself: it is a bug
    in the handler.

    Args:
        error: as it was caught.
        device: the type of the device that trains. On `cpu` the host's memory is the device's.

    Returns:
        The verdict; None for an error that is not about the size and should propagate.
    """
    pattern = find_pattern(error)
    return None if pattern is None else _verdict_on(device, pattern)


def find_pattern(error: BaseException) -> OOMPattern | None:
    """The row of the table that an error, or the first of its causes that has one, matches."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        pattern = _look_up(cause)
        if pattern is not None:
            return pattern
        cause = cause.__cause__
    return None


def find_in_text(text: str) -> OOMPattern | None:
    """The row whose message is found in what a process printed before it died."""
    return next((pattern for pattern in MESSAGES if re.search(pattern.message, text)), None)


def _verdict_on(device: str, pattern: OOMPattern) -> Verdict:
    """On a CPU the host's memory is the device's."""
    on_device = device == "cpu" and pattern.verdict is Verdict.HOST_OUT_OF_MEMORY
    return Verdict.OUT_OF_MEMORY if on_device else pattern.verdict


def _look_up(error: BaseException) -> OOMPattern | None:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    for pattern in TYPES:
        if pattern.exception in names:
            return pattern
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOMEM):
        return None
    text = str(error)
    for pattern in MESSAGES:
        if pattern.exception in names and re.search(pattern.message, text):
            return pattern
    return None


KILLED = "killed, probably by the kernel's out-of-memory killer"


def decode(death: ChildDied, what: str, device: str) -> Measurement:
    """The measurement that a death amounts to.

    Args:
        death: how the process ended, when it was run again as well.
        what: model and size, for the message.
        device: the type of the device that trained.

    Raises:
        ProbeDied: the death says nothing about memory: a segmentation fault, an assertion, an exit.
    """
    if death.exit_code == -signal.SIGKILL:
        return Measurement(Verdict.HOST_OUT_OF_MEMORY, message=KILLED)
    pattern = find_in_text(death.last_words)
    if pattern is not None:
        return Measurement(_verdict_on(device, pattern), message=death.last_words)
    raise ProbeDied(what, death.exit_code, death.last_words)
