"""A simulated GPU on which real steps run out of memory, and a meter that counts the steps of a search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from unittest.mock import patch

import torch

from batchfinder.find import find_max_batch_size
from batchfinder.measure.oom import classify
from batchfinder.results import Shape
from batchfinder.search import Prediction, Secant
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.replay import StageMemory, Timeline, replay
from batchfinder.simulator.steady_state import MORE_STEPS, SimulatedProbe, predict_max_batch_size, repeat_last_step

T = TypeVar("T")

_FAILURES_ABOVE = 12
"""So many sizes above the largest must not train."""

_VALUES: list[object] = []


class Unrestored(Generic[T]):
    """A value that stays as it is when batchfinder restores the training state.

    The snapshot covers every object that a training step can reach, counters of steps included, but no globals of a
    module, where this value is.
    """

    def __init__(self, value: T) -> None:
        self._index = len(_VALUES)
        _VALUES.append(value)

    def __reduce__(self) -> tuple[type[Unrestored[T]], tuple[T]]:
        return Unrestored, (self.value,)

    @property
    def value(self) -> T:
        """The value."""
        return _VALUES[self._index]  # type: ignore[return-value]

    @value.setter
    def value(self, value: T) -> None:
        _VALUES[self._index] = value


@dataclass
class Counts:
    """What a meter has counted.

    Attributes:
        steps: training steps begun.
        tries: the size of each try, in order.
        failed: the size of each out-of-memory error, in order.
        new_try: whether the next step begins a try, whatever its size.
    """

    steps: int = 0
    tries: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    new_try: bool = True


class Meter:
    """Counts steps, tries and out-of-memory errors in the training step itself.

    A try is a run of steps at one size. Another size begins a new one, and so does the step after an error.
    """

    def __init__(self) -> None:
        self._counts = Unrestored(Counts())

    @property
    def counts(self) -> Counts:
        """The counts so far."""
        return self._counts.value

    def begin(self, batch_size: int) -> None:
        """Count a step."""
        counts = self.counts
        counts.steps += 1
        if counts.new_try or counts.tries[-1] != batch_size:
            counts.tries.append(batch_size)
        counts.new_try = False

    @contextmanager
    def counting_errors(self, device: str) -> Iterator[None]:
        """Count an out-of-memory error that passes through, of a device of this type."""
        try:
            yield
        except Exception as error:
            counts = self.counts
            if classify(error, device=device) is not None and counts.tries:
                counts.failed.append(counts.tries[-1])
                counts.new_try = True
            raise


class SimulatedCard:
    """A GPU with the memory of a recorded step: batchfinder's `Memory`, and a `torch.OutOfMemoryError` for too much.

    Args:
        probe: simulates the step on the GPU.
        shape: one sample's shape.
    """

    name = "simulated"

    def __init__(self, probe: SimulatedProbe, shape: Shape) -> None:
        self._probe = probe
        self._shape = shape
        self.total_bytes = probe.memory.capacity_bytes
        self.allowance_bytes = self.total_bytes
        self._timelines: Unrestored[dict[int, Timeline]] = Unrestored({})
        self._peaks_and_retries = Unrestored((0, 0, 0))
        self._held = Unrestored(0)
        self._last_step = Unrestored((0, -1))  # its size, and its number in a run of steps of that size

    def forward(self, batch_size: int) -> None:
        """Begin a step: fail if any part of it does not fit, and else count the first forward's peak.

        A step of the same size as the one before finds that one's segments in the allocator.

        Raises:
            torch.OutOfMemoryError: the step does not fit.
        """
        timeline = self._timeline(batch_size)
        size, step = self._last_step.value
        step = step + 1 if size == batch_size else 0
        self._last_step.value = (batch_size, step)
        if timeline.oom is not None and timeline.oom.moment.step <= step:
            self._last_step.value = (0, -1)
            raise torch.OutOfMemoryError(timeline.oom.message)
        allocated, reserved, retries = self._peaks_and_retries.value
        retries += _retries_until(timeline, step) - _retries_until(timeline, step - 1)
        forward = _stage(timeline, 0, "loss").max_allocated_bytes
        self._peaks_and_retries.value = (max(allocated, forward), reserved, retries)

    def backward(self, batch_size: int) -> None:
        """End the step that `forward` began: count its peaks, and hold gradients and optimizer state."""
        timeline = self._timeline(batch_size)
        allocated, reserved, retries = self._peaks_and_retries.value
        peaks = max(allocated, timeline.max_allocated_bytes), max(reserved, timeline.max_reserved_bytes)
        self._peaks_and_retries.value = (*peaks, retries)
        self._held.value = _stage(timeline, 0, "optimizer").allocated_bytes

    def trains(self, batch_size: int) -> bool:
        """Whether the first step and `MORE_STEPS` after it fit."""
        return self._timeline(batch_size).fits

    def largest(self, start: int) -> int:
        """The largest size that trains, with `_FAILURES_ABOVE` sizes above it that do not; `start` trains."""
        size = start
        while above := [more for more in range(1, _FAILURES_ABOVE + 1) if self.trains(size + more)]:
            size += above[-1]
        return size

    def _timeline(self, batch_size: int) -> Timeline:
        """The first step and `MORE_STEPS` after it, replayed once, so that a search's seconds are its own."""
        timelines = self._timelines.value
        if batch_size not in timelines:
            trace = self._probe.trace(batch_size, self._shape)
            longer = repeat_last_step(trace.structure, MORE_STEPS)
            assert longer is not None
            structure, origins = longer
            allocator = CachingAllocator(self._probe.memory, self._probe.allocator)
            timelines[batch_size] = replay(structure, [trace.sizes[i] for i in origins], allocator)
        return timelines[batch_size]

    def predicted_size(self) -> int:
        """The simulated step's answer, from which batchfinder's callback starts on a GPU."""
        line = predict_max_batch_size(self._probe, self._shape)
        search = Secant(limit_bytes=self.total_bytes, tolerance=0.0, predicted=line)
        return find_max_batch_size(self._probe, self._shape, search=search).max_batch_size

    @contextmanager
    def replacing(self, memory_of: str, predict: str | None = None) -> Iterator[None]:
        """A context in which batchfinder reads this memory, not the real device's.

        Args:
            memory_of: the dotted name of `memory_of` in the module that calls it.
            predict: likewise of the function that predicts a size; None to leave it.
        """
        with ExitStack() as patches:
            patches.enter_context(patch(memory_of, lambda device, budget: self))
            if predict is not None:
                patches.enter_context(patch(predict, lambda *arguments, **options: Prediction(self.predicted_size())))
                patches.enter_context(patch(f"{predict.rpartition('.')[0]}.simulated_device"))
            yield

    # The rest is `batchfinder.measure.device_memory.Memory`.

    def free_bytes(self) -> int:
        return self.total_bytes

    def max_peak_bytes(self, held_bytes: int) -> int:
        """All of it: a copy of the small net that really trains is not on this card."""
        return self.total_bytes

    def held_bytes(self) -> int:
        """The recorded model; after a step its gradients and optimizer state as well."""
        return self._held.value

    def limited(self, reserve_bytes: int, held_bytes: int) -> nullcontext[None]:
        """The card is its own limit."""
        return nullcontext()

    def reset_peak(self) -> None:
        """Start with the model alone on the card."""
        self._last_step.value = (0, -1)
        self._held.value = _stage(self._probe.timeline(1, self._shape), -1, "model").allocated_bytes
        self._peaks_and_retries.value = (self._held.value, 0, self._peaks_and_retries.value[2])

    def peaks(self) -> tuple[int | None, int | None]:
        return self._peaks_and_retries.value[:2]

    def retries(self) -> int:
        return self._peaks_and_retries.value[2]


def _stage(timeline: Timeline, step: int, name: str) -> StageMemory:
    return next(stage for stage in timeline.stages if (stage.step, stage.stage) == (step, name))


def _retries_until(timeline: Timeline, step: int) -> int:
    """Allocation retries until the end of a step."""
    return max((stage.num_alloc_retries for stage in timeline.stages if stage.step <= step), default=0)
