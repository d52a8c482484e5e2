"""Every exception batchfinder raises.

    BatchFinderError                what went wrong, the numbers, the next move
    ├── InvalidValue                an option or argument has a value that cannot be meant
    ├── UnknownName                 no such GPU, instance or model; the nearest ones are named
    ├── OutOfMemory                 a size did not fit, for those who asked to have it raised
    ├── RecordingFailed             a training step could not be recorded on the pretend GPU
    │   └── RecordingDied           the recording's process ended without an answer
    ├── ProbeDied                   the process that took real steps ended twice, and not for want of memory
    ├── UserCodeFailed              code of the user's raised; its own traceback is kept
    │   └── ContextDied             and it left the card's context dead behind it, twice
    ├── MissingExtra                something was asked for that needs a package which is not installed
    ├── CardNeeded                  a GPU was asked for and there is none here, or too little of it is free
    └── CacheFailed                 the cache cannot be read or written where it was asked to be

The command line prints the text of any of these and exits with 1. Anything else that escapes is a bug of ours.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence


class BatchFinderError(Exception):
    """Base of the tree; its text is a message for a person."""


class InvalidValue(BatchFinderError, ValueError):
    """An option or argument has a value that cannot be meant.

    Attributes:
        option: what the value was given for.
        value: the value, as it was given.
        expected: what would do instead, in words.
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        self.option = option
        self.value = value
        self.expected = expected
        super().__init__(f"{option}: {value!r} will not do; expected {expected}.")


class UnknownName(BatchFinderError, LookupError):
    """A look-up by name found nothing.

    Attributes:
        kind: what was looked up (`GPU`, `instance`, `model`).
        name: the name, as it was given.
        matches: the nearest known names, best first; may be empty.
    """

    def __init__(self, kind: str, name: str, matches: Sequence[str], hint: str = "") -> None:
        self.kind = kind
        self.name = name
        self.matches = tuple(matches)
        nearest = f" Did you mean {', '.join(self.matches)}?" if self.matches else ""
        super().__init__(f"unknown {kind} {name!r}.{nearest}{' ' + hint if hint else ''}")


class OutOfMemory(BatchFinderError, MemoryError):
    """A size did not fit. Raised by `Measurement.raise_for_verdict`.

    Attributes:
        batch_size: the micro-batch that was tried; None where no size was meant.
        detail: the device's own message.
    """

    def __init__(self, batch_size: int | None, detail: str) -> None:
        self.batch_size = batch_size
        self.detail = detail
        at = "" if batch_size is None else f"batch size {batch_size} "
        super().__init__(f"{at}does not fit: {detail}")


class RecordingFailed(BatchFinderError):
    """A training step could not be recorded on the pretend GPU."""


class RecordingDied(RecordingFailed):
    """The recording's process ended without an answer.

    Attributes:
        operator: the operator that was running, empty when none was.
        exit_code: the process's exit code, negative for a signal.
        last_words: the end of what the process printed.
    """

    def __init__(self, what: str, operator: str, exit_code: int | None, last_words: str = "") -> None:
        self.operator = operator
        self.exit_code = exit_code
        self.last_words = last_words
        ran = f" while {operator} was running" if operator else ""
        printed = f" It printed last:\n{last_words}" if last_words else ""
        super().__init__(f"recording {what} ended{ran} (the recording process exited with {exit_code}).{printed}")


class ProbeDied(BatchFinderError):
    """The process that took real steps ended, twice, in a way that says nothing about memory.

    Attributes:
        exit_code: the process's exit code, negative for a signal.
        last_words: the end of what the process printed.
    """

    def __init__(self, what: str, exit_code: int, last_words: str = "") -> None:
        self.exit_code = exit_code
        self.last_words = last_words
        printed = f" It printed last:\n{last_words}" if last_words else " It printed nothing."
        super().__init__(
            f"the process that trained {what} ended twice without an answer, with {_how(exit_code)}.{printed}\n"
            "Run one training step at this size in a process of your own to see why."
        )


class UserCodeFailed(BatchFinderError):
    """Code of the user's raised; nothing of ours is in its traceback.

    Attributes:
        what: which code ran (`my.module:factory`).
        traceback: the traceback as text, beginning in the user's code.
    """

    def __init__(self, what: str, traceback: str) -> None:
        self.what = what
        self.traceback = traceback
        super().__init__(f"{what} raised:\n{traceback.rstrip()}")


class ContextDied(UserCodeFailed):
    """Code of the user's raised, and the card's context died of it: nothing more can be done there by that process.

    A device-side assertion (an index out of range in an embedding) or an illegal access of a kernel does this.
    """

    def __init__(self, what: str, traceback: str) -> None:
        super().__init__(what, traceback)
        self.args = (
            f"{what} left the card's context dead behind it, twice. It raised:\n{traceback.rstrip()}\n"
            "Run one training step at this size on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see where.",
        )


class MissingExtra(BatchFinderError):
    """Something was asked for that needs a package which is not installed.

    Attributes:
        package: which one.
        extra: batchfinder's extra that brings it.
        what: what needs it.
    """

    def __init__(self, package: str, extra: str, what: str) -> None:
        self.package = package
        self.extra = extra
        self.what = what
        super().__init__(
            f"{what} needs {package}, which is not installed. "
            f"Install it with: pip install {package} (or batchfinder with its extra: batchfinder[{extra}])"
        )


class CardNeeded(BatchFinderError):
    """Cells were to be run on a GPU, and there is none here that has room for them.

    Attributes:
        needed_bytes: what PyTorch's allocator must be able to take of the GPU.
        detail: what needs it, and what there is, in words.
    """

    def __init__(self, needed_bytes: int, detail: str) -> None:
        self.needed_bytes = needed_bytes
        self.detail = detail
        super().__init__(f"{detail}. Run it on such a machine, or leave --measured out: the simulation needs no GPU.")


class CacheFailed(BatchFinderError):
    """The cache cannot be read or written where it was asked to be.

    Attributes:
        url: where.
        reason: the file system's own words.
    """

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(
            f"the cache at {url} cannot be used: {reason}. "
            "Set BATCHFINDER_CACHE or --cache to a place that can be written, or pass --no-cache."
        )


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"
