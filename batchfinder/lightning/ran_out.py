"""Training that ran out of memory at a size that was found: the record is lowered, and the user told what to do."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_warn

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
    advice = "Leave more free with BatchFinder(headroom=0.05)."
    if found.slot is None:
        rank_zero_warn(f"{happened} {advice}")
        return
    try:
        lowered = lower(found.slot, found.batch_size, str(exception))
    except CacheFailed as error:
        rank_zero_warn(
            f"{happened} {advice} The cache at {error.url} still says {found.batch_size}, since it cannot be written: "
            f"{error.reason.rstrip('.')}."
        )
        return
    rank_zero_warn(f"{happened} The cache now says {lowered}, which the next start tries before it uses it.")
