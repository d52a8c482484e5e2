"""One try: steps are taken, measured, and undone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from batchfinder.outcome import Measurement, Verdict
from batchfinder.probing.apart import apart
from batchfinder.probing.clearing import Failure, attempt, clear
from batchfinder.probing.listening import listening
from batchfinder.probing.memory import Memory
from batchfinder.probing.settling import Settling
from batchfinder.probing.state import TrainingState


def tried(
    steps: Callable[[Settling], object], state: TrainingState, memory: Memory, device: torch.device
) -> Measurement:
    """Take steps, put everything back, and say what they took.

    Where the limit is the process's own, on a CPU, the steps run in a thread of their own; see `probing/apart.py`.

    Args:
        steps: takes them, as many as it is told to go on for, within the memory's limit, and waits for the device.
        state: what to put back afterwards, however they end.
        memory: the device's memory.
        device: where they run.

    Raises:
        Exception: whatever the steps raised that is not about the size, unchanged, with all put back.
    """
    held_bytes = memory.held_bytes()
    memory.reset_peak()
    settling, started = Settling(memory.retries), time.perf_counter()
    try:
        with listening(memory) as readings:
            if device.type == "cpu" and memory.enforced:
                seen = apart(lambda: attempt(lambda: steps(settling), device.type))
            else:
                seen = attempt(lambda: steps(settling), device.type)
        seconds = time.perf_counter() - started
        allocated, reserved = memory.peaks()
        message = settling.message()
    finally:
        state.restore()
    clear(device)
    memory.leaves_behind(memory.held_bytes() - held_bytes)
    if isinstance(seen, Failure):
        return Measurement(seen.verdict, seconds=seconds, message=seen.message)
    if message:
        return Measurement(Verdict.THRASHING, allocated, reserved, seconds, message)
    resting, forward = readings.resting_bytes, readings.forward_bytes
    return Measurement(Verdict.FITS, allocated, reserved, seconds, resting_bytes=resting, forward_bytes=forward)
