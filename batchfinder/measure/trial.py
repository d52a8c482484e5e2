"""Whether a size that needed the allocator's cache given back goes on without; see `simulator/settling.py`.

What the stages of the steps tell of a size beside its peak: it shows a search the way where the peak is flat.

Reading the stages of a step that somebody else wrote: where its first backward begins, where a step has ended.

One try: steps are taken, measured, and undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchfinder.measure.apart import apart
from batchfinder.measure.cleanup import Failure, attempt, clear
from batchfinder.measure.device_memory import Memory
from batchfinder.results import Measurement, Verdict
from batchfinder.simulator.steady_state import MORE_STEPS
from batchfinder.snapshot.training_state import TrainingState


class SteadyStateCheck:
    """Lets a try take more steps until one goes by in which the allocator kept its cache.

    Args:
        retries: says how often the allocator has given back its cache to go on, in all.

    Attributes:
        settled: False once `MORE_STEPS` were taken, each of which gave it back.
    """

    def __init__(self, retries: Callable[[], int]) -> None:
        self._retries = retries
        self._before = self._last = retries()
        self._more = 0
        self.settled = True

    def goes_on(self) -> bool:
        """Ask whether the try needs another step: after those it takes anyway, and after each one more."""
        last, self._last = self._last, self._retries()
        if self._last == last:
            return False
        if self._more == MORE_STEPS:
            self.settled = False
            return False
        self._more += 1
        return True

    def message(self) -> str:
        """What to say of a size that does not settle; empty for one that does.

        Steps that never asked have not settled either, where the cache was given back.
        """
        if self.settled and not self.goes_on():
            return ""
        times = self._last - self._before
        return f"it ran, but only by giving back all cached memory {'once' if times == 1 else f'{times} times'}"


class StageReadings:
    """Listens to `Step.run` and reads the memory as stages begin.

    At small sizes a step's peak is the optimizer's, whatever the size. These two are not: what stays between steps is
    where the peaks of large sizes begin, and the first forward takes nearly what a sample adds to them.

    Args:
        held: bytes held now, counted as peaks are.
        peak: the most bytes held so far.

    Attributes:
        resting_bytes: held as the last micro-batch of a later step begins; None before.
        forward_bytes: the most the first forward, loss included, took beyond what was held before; None before.
    """

    def __init__(self, held: Callable[[], int], peak: Callable[[], int]) -> None:
        self._held = held
        self._peak = peak
        self._before_bytes: int | None = None
        self.resting_bytes: int | None = None
        self.forward_bytes: int | None = None

    def __call__(self, step: int, stage: str, micro_batch: int) -> None:
        """Told by `Step.run` as each stage begins.

        Args:
            step: which optimizer step, from 0.
            stage: `batch`, `forward`, `loss`, `backward` or another.
            micro_batch: which micro-batch of the step, from 0.
        """
        if stage == "batch" and step == 0 and micro_batch == 0:
            self._before_bytes = self._held()
        elif stage == "batch" and step > 0:
            self.resting_bytes = self._held()
        elif stage == "backward" and step == 0 and micro_batch == 0 and self._before_bytes is not None:
            self.forward_bytes = max(0, self._peak() - self._before_bytes)


@contextmanager
def listening(memory: Memory) -> Iterator[StageReadings]:
    """Read what stays between steps and what the first forward takes, while a user's own steps run.

    The forward has ended where `torch.autograd.backward` is called, which `Tensor.backward` does as well; a step that
    calls `torch.autograd.grad` alone is not read. No hooks on modules: a compiled one would be compiled again for them.

    Args:
        memory: the device's memory. Where it does not count what is allocated, nothing is read.

    Yields:
        What was read; None in each place where nothing was.
    """
    readings = StageReadings(memory.held_bytes, lambda: memory.peaks()[0] or 0)
    if memory.peaks()[0] is None:
        yield readings
        return
    readings(0, "batch", 0)
    backward, first = torch.autograd.backward, True

    def read_and_go_on(*arguments: Any, **options: Any) -> None:
        nonlocal first
        if first:
            first = False
            readings(0, "backward", 0)
        backward(*arguments, **options)

    def stepped(optimizer: Any, arguments: Any, options: Any) -> None:
        # Gradients are alive here, as they are at the peak of the steps to come.
        readings(1, "batch", 0)

    hook = register_optimizer_step_post_hook(stepped)
    torch.autograd.backward = read_and_go_on
    try:
        yield readings
    finally:
        torch.autograd.backward = backward
        hook.remove()


def tried(
    steps: Callable[[SteadyStateCheck], object], state: TrainingState, memory: Memory, device: torch.device
) -> Measurement:
    """Take steps, put everything back, and say what they took.

    Where the limit is the process's own, on a CPU, the steps run in a thread of their own; see `measure/apart.py`.

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
    settling, started = SteadyStateCheck(memory.retries), time.perf_counter()
    try:
        with listening(memory) as readings:
            if device.type == "cpu" and memory.has_hard_limit:
                seen = apart(lambda: attempt(lambda: steps(settling), device.type))
            else:
                seen = attempt(lambda: steps(settling), device.type)
        seconds = time.perf_counter() - started
        allocated, reserved = memory.peaks()
        message = settling.message()
    finally:
        state.restore()
    clear(device)
    memory.record_leak(memory.held_bytes() - held_bytes)
    if isinstance(seen, Failure):
        return Measurement(seen.verdict, seconds=seconds, message=seen.message)
    if message:
        return Measurement(Verdict.THRASHING, allocated, reserved, seconds, message)
    resting, forward = readings.resting_bytes, readings.forward_bytes
    return Measurement(Verdict.FITS, allocated, reserved, seconds, resting_bytes=resting, forward_bytes=forward)
