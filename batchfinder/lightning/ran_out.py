"""Training that ran out of memory at a size that was found: the record is lowered, and the user told what to do."""

from __future__ import annotations

import warnings

from batchfinder.errors import BatchFinderError, CacheFailed
from batchfinder.lightning.finding import Found
from batchfinder.outcome import Verdict
from batchfinder.probing.known import lower
from batchfinder.probing.signs import classify


def ran_out(found: Found, stage: str, exception: BaseException, device: str) -> None:
    """Lower the record where an exception says that memory ran out; say nothing of any other.

    Args:
        found: what the stage ran with.
        stage: `fit`, `validate`, `test` or `predict`.
        exception: what ended the run.
        device: the type of the device.
    """
    if isinstance(exception, BatchFinderError):
        return  # of the next search, which ended before training began
    if classify(exception, device=device) not in (Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY):
        return
    happened = f"BatchFinder: {stage} ran out of memory at batch size {found.batch_size}, which ran when it was tried."
    # A warning of this process, since it may be another rank than the first that ran out.
    warnings.warn(f"{happened} {_lowered(found, str(exception))}", stacklevel=2)


def _lowered(found: Found, message: str) -> str:
    """Lower the record; returns what a person should know of it."""
    advice = "Leave more free with BatchFinder(headroom=0.05)."
    if found.slot is None:
        return advice
    try:
        lowered = lower(found.slot, found.batch_size, message)
    except CacheFailed as error:
        return (
            f"{advice} The cache at {error.url} still says {found.batch_size}, since it cannot be written: "
            f"{error.reason.rstrip('.')}."
        )
    return f"The cache now says {lowered}, which the next start tries before it uses it."
