"""A simulated card: a step on it raises a genuine torch.OutOfMemoryError where the recorded step would not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from batchfinder.find import find_max_batch_size
from batchfinder.results import Measurement, Shape
from batchfinder.search import Secant
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.probe import SimulatedProbe, predict_max_batch_size
from batchfinder.simulator.replay import StageMemory, Timeline, replay
from batchfinder.simulator.steady_state import MORE_STEPS, repeated
from benchmarks.peer.kept import Kept

T = TypeVar("T")

_AROUND = 12
"""So many sizes above the largest must not run."""


class Remembering(SimulatedProbe):
    """Replays each size once: what a peer takes is its own time, and not the replay's."""

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """As before."""
        return self._kept((batch_size, shape), lambda: super(Remembering, self).__call__(batch_size, shape))

    def many_steps(self, batch_size: int, shape: Shape) -> Timeline:
        """What becomes of so many steps of a size that all later ones are like the last.

        Args:
            batch_size: samples in the batch.
            shape: one sample's shape.
        """
        return self._kept((batch_size, shape, "many"), lambda: self._many_steps(batch_size, shape))

    def _many_steps(self, batch_size: int, shape: Shape) -> Timeline:
        trace = self.trace(batch_size, shape)
        longer = repeated(trace.structure, MORE_STEPS)
        assert longer is not None
        structure, origins = longer
        sizes = [trace.sizes[i] for i in origins]
        return replay(structure, sizes, CachingAllocator(self.memory, self.allocator))

    def _kept(self, key: object, find: Callable[[], T]) -> T:
        if not hasattr(self, "_known"):
            self._known: Kept[dict[object, Any]] = Kept({})
        known = self._known.value
        if key not in known:
            known[key] = find()
        return known[key]  # type: ignore[no-any-return]


class SimulatedCard:
    """Takes steps, and says of its memory what `torch.cuda` would say of a real card's: batchfinder's `Memory`.

    Args:
        probe: knows the card and the step.
        shape: one sample's shape.
    """

    name = "simulated"
    has_hard_limit = True
    first_step_overhead = False

    def __init__(self, probe: Remembering, shape: Shape) -> None:
        self._probe = probe
        self._shape = shape
        self.total_bytes = probe.memory.capacity_bytes
        self.allowance_bytes = self.total_bytes
        self._seen = Kept((0, 0, 0))
        self._held = Kept(0)
        self._run = Kept((0, -1))  # the size of the last step, and which step of that size it was

    def forward(self, batch_size: int) -> None:
        """Begin a step: what all of it takes is checked, and the memory stands where the first forward has ended.

        After a step of the same size it is the step after that: in it the allocator has the segments of the one before.

        Args:
            batch_size: samples in the batch.

        Raises:
            torch.OutOfMemoryError: the step does not fit.
        """
        timeline = self._probe.many_steps(batch_size, self._shape)
        last, step = self._run.value
        step = step + 1 if last == batch_size else 0
        self._run.value = (batch_size, step)
        if timeline.oom is not None and timeline.oom.moment.step <= step:
            self._run.value = (0, -1)
            raise torch.OutOfMemoryError(timeline.oom.message)
        allocated, reserved, retries = self._seen.value
        retries += self._retries(timeline, step) - self._retries(timeline, step - 1)
        forward = self._stage(timeline, 0, "loss").max_allocated_bytes
        self._seen.value = (max(allocated, forward), reserved, retries)

    def backward(self, batch_size: int) -> None:
        """Go on to the step's end: peaks are those of all of it, and what stays is held.

        Args:
            batch_size: samples in the batch, for which `forward` has run.
        """
        timeline = self._probe.many_steps(batch_size, self._shape)
        allocated, reserved, retries = self._seen.value
        peaks = (max(allocated, timeline.max_allocated_bytes), max(reserved, timeline.max_reserved_bytes))
        self._seen.value = (*peaks, retries)
        self._held.value = self._stage(timeline, 0, "optimizer").allocated_bytes

    def _stage(self, timeline: Timeline, step: int, name: str) -> StageMemory:
        return next(stage for stage in timeline.stages if (stage.step, stage.stage) == (step, name))

    def _retries(self, timeline: Timeline, step: int) -> int:
        """How often the cache was given back until a step ended."""
        return max((stage.num_alloc_retries for stage in timeline.stages if stage.step <= step), default=0)

    def trains(self, batch_size: int) -> bool:
        """Whether all of so many steps of this size fit."""
        return self._probe.many_steps(batch_size, self._shape).fits

    def largest(self, guess: int) -> int:
        """The largest size that trains; every size within `_AROUND` above it has been tried, and does not.

        Args:
            guess: where to begin; trains.
        """
        size = guess
        while above := [more for more in range(1, _AROUND + 1) if self.trains(size + more)]:
            size += above[-1]
        return size

    def predicted(self) -> int:
        """What the simulated step says of this card: batchfinder's callback starts from it on a GPU."""
        line = predict_max_batch_size(self._probe, self._shape)
        search = Secant(limit_bytes=self.total_bytes, tolerance=0.0, predicted=line)
        return find_max_batch_size(self._probe, self._shape, search=search).max_batch_size

    @contextmanager
    def stands_in(self, place: str, hint: str | None = None) -> Iterator[None]:
        """Have batchfinder read this memory for the device's.

        Args:
            place: the name, dotted, by which the asking module knows `memory_of`.
            hint: the name by which it knows what asks the simulated step; None where it does not.
        """
        with ExitStack() as patches:
            patches.enter_context(patch(place, lambda device, budget: self))
            if hint is not None:
                patches.enter_context(patch(hint, lambda *arguments, **options: self.predicted()))
                patches.enter_context(patch(f"{hint.rpartition('.')[0]}.simulated_device"))
            yield

    def free_bytes(self) -> int:
        """All of it."""
        return self.total_bytes

    def max_peak_bytes(self, held_bytes: int) -> int:
        """All of it: a copy of the small net is not on the card."""
        return self.total_bytes

    def held_bytes(self) -> int:
        """The recorded model; after a step its gradients and its optimizer's state as well."""
        return self._held.value

    def limited(self, reserve_bytes: int, held_bytes: int) -> nullcontext[None]:
        """The card is its own limit."""
        return nullcontext()

    def record_leak(self, left_bytes: int) -> None:
        """Nothing is left."""

    def reset_peak(self) -> None:
        """Start to watch: what was before is given back."""
        self._run.value = (0, -1)
        self._held.value = self._stage(self._probe.timeline(1, self._shape), -1, "model").allocated_bytes
        self._seen.value = (self._held.value, 0, self._seen.value[2])

    def peaks(self) -> tuple[int | None, int | None]:
        """The simulated allocator's."""
        return self._seen.value[:2]

    def retries(self) -> int:
        """The simulated allocator's `num_alloc_retries`, over all steps."""
        return self._seen.value[2]
