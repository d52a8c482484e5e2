"""Recognising out of memory: an error is looked up in a table, types first, messages last.

What is not in the table is a bug or a choice of the user's, and propagates unchanged. So do, on purpose:

- an error that merely speaks of memory;
- `CUDA error: too many resources requested for launch` and `device kernel image is invalid`, which a kernel says at any
  batch size on a card it was not built for;
- `CUDA error: an illegal memory access was encountered`: kernels with 32-bit offsets fail so on tensors beyond 2**31
  elements, but so does any other bug of a kernel, and the process can do nothing more on its card.

What the end of a process that took real steps means.
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
    sign = find_sign(error)
    if sign is None:
        return None
    if sign.verdict is Verdict.HOST_OUT_OF_MEMORY and device == "cpu":
        return Verdict.OUT_OF_MEMORY
    return sign.verdict


def find_sign(error: BaseException) -> OOMPattern | None:
    """The row of the table that an error, or the first of its causes that has one, matches.

    Args:
        error: as it was caught.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        sign = _look_up(cause)
        if sign is not None:
            return sign
        cause = cause.__cause__
    return None


def find_in_text(text: str) -> OOMPattern | None:
    """The row whose message is found in the last words of a process that died.

    Args:
        text: what it printed.
    """
    return next((sign for sign in MESSAGES if re.search(sign.message, text)), None)


def _look_up(error: BaseException) -> OOMPattern | None:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    for sign in TYPES:
        if sign.exception in names:
            return sign
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOMEM):
        return None
    text = str(error)
    for sign in MESSAGES:
        if sign.exception in names and re.search(sign.message, text):
            return sign
    return None


KILLED = "killed, probably by the kernel's out-of-memory killer"

LAST_WORDS = (
    "libgomp: Thread creation failed",  # https://github.com/deepmodeling/deepmd-kit/issues/1757
    "cannot allocate memory for thread-local data",  # glibc's elf/dl-tls.c
)
"""What C libraries print before they end a process whose memory is full."""


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
    sign = find_in_text(death.last_words)
    if sign is not None:
        on_device = device == "cpu" and sign.verdict is Verdict.HOST_OUT_OF_MEMORY
        return Measurement(Verdict.OUT_OF_MEMORY if on_device else sign.verdict, message=death.last_words)
    if any(words in death.last_words for words in LAST_WORDS):
        verdict = Verdict.OUT_OF_MEMORY if device == "cpu" else Verdict.HOST_OUT_OF_MEMORY
        return Measurement(verdict, message=death.last_words)
    raise ProbeDied(what, death.exit_code, death.last_words)
