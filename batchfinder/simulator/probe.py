"""A probe that replays the recorded step on a simulated GPU, and a linear first guess of the largest batch size."""

from __future__ import annotations

import time
from collections.abc import Iterable

from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import UNLIMITED, CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.replay import Timeline, replay
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import MORE_STEPS, SteadyState, simulate_steady_state
from batchfinder.simulator.trace import Trace


class SimulatedProbe:
    """Says whether a size would run on a simulated card.

    Args:
        unmodelled: what any answer leaves out, in words.
    """

    source = "simulated"

    def __init__(
        self,
        traces: TraceSource,
        memory: DeviceMemory,
        allocator: AllocatorSettings | None = None,
        unmodelled: Iterable[str] = (),
    ) -> None:
        self.traces = traces
        self.memory = memory
        self.allocator = allocator or AllocatorSettings()
        self._unmodelled = dict.fromkeys(unmodelled)

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What the answers so far leave out, in words."""
        return tuple(self._unmodelled)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        start = time.perf_counter()
        steady = self.steady_state(batch_size, shape)
        timeline = steady.timeline
        seconds = time.perf_counter() - start
        if timeline.oom is not None:
            needed = self.needed_bytes(batch_size, shape) if batch_size == 1 else None
            return Measurement(
                Verdict.OUT_OF_MEMORY, seconds=seconds, message=timeline.oom.message, needed_bytes=needed
            )
        peaks = timeline.max_allocated_bytes, timeline.max_reserved_bytes
        if not steady.settled:
            message = f"thrashing: the allocator releases all cached memory in each of {MORE_STEPS} more steps"
            return Measurement(Verdict.THRASHING, *peaks, seconds, message)
        return Measurement(Verdict.FITS, *peaks, seconds)

    def timeline(self, batch_size: int, shape: Shape, memory: DeviceMemory | None = None) -> Timeline:
        """The replay of one size, on this card or another."""
        trace = self.trace(batch_size, shape)
        return replay(trace.structure, trace.sizes, CachingAllocator(memory or self.memory, self.allocator))

    def needed_bytes(self, batch_size: int, shape: Shape) -> int:
        """The most the allocator would reserve for a size on a card with unlimited memory."""
        return self.timeline(batch_size, shape, UNLIMITED).max_reserved_bytes

    def steady_state(self, batch_size: int, shape: Shape, exact: bool = False) -> SteadyState:
        """One size replayed until the allocator's cache is steady; `exact` as for `trace`."""
        trace = self.trace(batch_size, shape, exact)
        return simulate_steady_state(
            trace.structure, trace.sizes, lambda: CachingAllocator(self.memory, self.allocator)
        )

    def trace(self, batch_size: int, shape: Shape, exact: bool = False) -> Trace:
        """The step's trace at one size.

        Args:
            exact: recorded at this very size, which is quicker where one size is all that is asked for.
        """
        at = self.traces.recorded if exact else self.traces.at
        trace = at(batch_size, shape.seq_len)
        self._unmodelled.update(dict.fromkeys(trace.unmodelled))
        return trace


# A batch of one needs a recording of its own, so neither size is 1.
_SMALL, _LARGE = 2, 32


def predict_max_batch_size(probe: SimulatedProbe, shape: Shape) -> int:
    """A guess to start a search from: where a line through the peaks of two sizes crosses the card's capacity.

    Returns:
        A size of at least 2.
    """
    low, high = (probe.timeline(size, shape, UNLIMITED).max_allocated_bytes for size in (_SMALL, _LARGE))
    per_sample = (high - low) / (_LARGE - _SMALL)
    if per_sample <= 0:
        return _LARGE
    return max(_SMALL, int(_SMALL + (probe.memory.capacity_bytes - low) / per_sample))
