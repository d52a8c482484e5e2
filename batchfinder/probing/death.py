"""What the end of a process that took real steps means."""

from __future__ import annotations

import signal

from batchfinder.errors import ProbeDied
from batchfinder.outcome import Measurement, Verdict
from batchfinder.probing.signs import find_in_text
from batchfinder.step.child import ChildDied

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
