"""A simulated card: a step on it raises a genuine torch.OutOfMemoryError where the recorded step would not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

from batchfinder.find import find_max_batch_size
from batchfinder.outcome import Shape
from batchfinder.search import Secant
from batchfinder.simulator.memory import DeviceMemory
from batchfinder.simulator.predict import predict_max_batch_size
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.simulator.timeline import StageMemory, Timeline
from batchfinder.tracing.simulated_step import simulated_step
from benchmarks.peer.kept import Kept

_AROUND = 12
"""So many sizes above the largest must not run."""


class Remembering(SimulatedProbe):
    """Replays each size once: what a peer takes is its own time, and not the replay's."""

    def timeline(self, batch_size: int, shape: Shape, memory: DeviceMemory | None = None) -> Timeline:
        """As before, where the card is the probe's own."""
        if memory is not None:
            return super().timeline(batch_size, shape, memory)
        if not hasattr(self, "_known"):
            self._known: Kept[dict[tuple[int, Shape], Timeline]] = Kept({})
        known = self._known.value
        if (batch_size, shape) not in known:
            known[batch_size, shape] = super().timeline(batch_size, shape)
        return known[batch_size, shape]


class SimulatedCard:
    """Takes steps, and says of its memory what `torch.cuda` would say of a real card's: batchfinder's `Memory`.

    Args:
        probe: knows the card and the step.
        shape: one sample's shape.
    """

    name = "simulated"
    enforced = True
    warms_up = False

    def __init__(self, probe: SimulatedProbe, shape: Shape) -> None:
        self._probe = probe
        self._shape = shape
        self.total_bytes = probe.memory.capacity_bytes
        self.allowance_bytes = self.total_bytes
        self._seen = Kept((0, 0, 0))
        self._held = Kept(0)

    def forward(self, batch_size: int) -> None:
        """Begin a step: what all of it takes is checked, and the memory stands where the first forward has ended.

        Args:
            batch_size: samples in the batch.

        Raises:
            torch.OutOfMemoryError: the step does not fit.
        """
        simulated_step(self._probe, batch_size, self._shape)
        timeline = self._probe.timeline(batch_size, self._shape)
        allocated, reserved, retries = self._seen.value
        forward = self._stage(timeline, 0, "loss").max_allocated_bytes
        self._seen.value = (max(allocated, forward), reserved, retries + timeline.num_alloc_retries)

    def backward(self, batch_size: int) -> None:
        """Go on to the step's end: peaks are those of all of it, and what stays is held.

        Args:
            batch_size: samples in the batch, for which `forward` has run.
        """
        timeline = self._probe.timeline(batch_size, self._shape)
        allocated, reserved, retries = self._seen.value
        peaks = (max(allocated, timeline.max_allocated_bytes), max(reserved, timeline.max_reserved_bytes))
        self._seen.value = (*peaks, retries)
        self._held.value = self._stage(timeline, 0, "optimizer").allocated_bytes

    def _stage(self, timeline: Timeline, step: int, name: str) -> StageMemory:
        return next(stage for stage in timeline.stages if (stage.step, stage.stage) == (step, name))

    def fits(self, batch_size: int) -> bool:
        """Whether a step of this size fits."""
        return self._probe(batch_size, self._shape).fits

    def steady(self, batch_size: int) -> bool:
        """Whether a step of this size fits without the allocator giving back its cache on the way."""
        timeline = self._probe.timeline(batch_size, self._shape)
        return timeline.fits and not timeline.num_alloc_retries

    def largest(self, guess: int, runs: Callable[[int], bool]) -> int:
        """The largest size that runs; every size within `_AROUND` above it has been tried, and does not.

        Args:
            guess: where to begin.
            runs: `fits` or `steady`.
        """
        size = guess
        while size > 1 and not runs(size):
            size = size * 9 // 10
        while above := [more for more in range(1, _AROUND + 1) if runs(size + more)]:
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

    def room_bytes(self, held_bytes: int) -> int:
        """All of it: a copy of the small net is not on the card."""
        return self.total_bytes

    def held_bytes(self) -> int:
        """The recorded model; after a step its gradients and its optimizer's state as well."""
        return self._held.value

    def limited(self, reserve_bytes: int, held_bytes: int) -> nullcontext[None]:
        """The card is its own limit."""
        return nullcontext()

    def leaves_behind(self, left_bytes: int) -> None:
        """Nothing is left."""

    def reset_peak(self) -> None:
        """Start to watch."""
        self._held.value = self._stage(self._probe.timeline(1, self._shape), -1, "model").allocated_bytes
        self._seen.value = (self._held.value, 0, self._seen.value[2])

    def peaks(self) -> tuple[int | None, int | None]:
        """The simulated allocator's."""
        return self._seen.value[:2]

    def retries(self) -> int:
        """The simulated allocator's `num_alloc_retries`, over all steps."""
        return self._seen.value[2]
