"""Run a recorded step through the simulated allocator: memory by stage, the peaks, and where it ran out of memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, SimulatedOutOfMemory
from batchfinder.simulator.trace import TraceStructure


def replay(
    structure: TraceStructure,
    sizes: Sequence[int],
    allocator: CachingAllocator,
    stop_when: Callable[[Sequence[StageMemory]], bool] | None = None,
) -> Timeline:
    """Replay a trace.

    Args:
        sizes: for each block, the bytes asked for. They may be of another size than the recorded one.
        allocator: a new one, made for the card and the settings in question. It is left as the trace leaves it.
        stop_when: called as each stage ends with all that have ended; True ends the replay.

    Returns:
        The counters at the end of each stage, the peaks, and the failure if the card is too small.
    """
    order, marks = structure.order, structure.marks
    live: list[Block | None] = [None] * len(sizes)
    streams = structure.streams
    allocate, free = allocator.allocate, allocator.free
    most_allocated = most_reserved = 0
    allocated_peak = reserved_peak = -1
    stages: list[StageMemory] = []
    grown: list[int] = []
    oom: OomEvent | None = None
    i = -1
    starts = [0, *(mark.position for mark in marks)]
    ends = [*(mark.position for mark in marks), len(order)]
    taken = allocator.taken
    try:
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for i in order[start:end]:
                if i < 0:
                    free(live[~i])
                    continue
                live[i] = allocate(sizes[i], streams[i]) if streams else allocate(sizes[i])
                if allocator.max_allocated > most_allocated:
                    most_allocated = allocator.max_allocated
                    allocated_peak = i
                if taken.peak > most_reserved:
                    most_reserved = taken.peak
                    reserved_peak = i
                    grown.append(i)
            if number:
                mark = marks[number - 1]
                stages.append(
                    StageMemory(
                        step=mark.step,
                        stage=mark.stage,
                        micro_batch=mark.micro_batch,
                        allocated_bytes=allocator.allocated,
                        max_allocated_bytes=allocator.max_allocated,
                        reserved_bytes=allocator.reserved,
                        max_reserved_bytes=allocator.max_reserved,
                        num_alloc_retries=allocator.num_alloc_retries,
                    )
                )
                if stop_when is not None and stop_when(stages):
                    break
    except SimulatedOutOfMemory as error:
        oom = OomEvent(
            moment=_peak_event(structure, i),
            requested_bytes=error.requested_bytes,
            tried_bytes=error.tried_bytes,
            allocated_bytes=error.allocated_bytes,
            reserved_bytes=error.reserved_bytes,
            message=str(error),
        )
    return Timeline(
        stages=tuple(stages),
        max_allocated_bytes=allocator.max_allocated,
        max_reserved_bytes=allocator.max_reserved,
        allocated_peak=None if allocated_peak < 0 else _peak_event(structure, allocated_peak),
        reserved_peak=None if reserved_peak < 0 else _peak_event(structure, reserved_peak),
        num_alloc_retries=allocator.num_alloc_retries,
        grown=tuple(grown),
        oom=oom,
    )


def alive_at(structure: TraceStructure, position: int) -> list[int]:
    """The blocks alive right after an event, in the order in which they were allocated."""
    alive: dict[int, None] = {}
    for i in structure.order[: position + 1]:
        if i >= 0:
            alive[i] = None
        else:
            del alive[~i]
    return list(alive)


def _peak_event(structure: TraceStructure, block: int) -> PeakEvent:
    """The allocation of a block. Of marks at one position the last one counts: the others' stages are empty."""
    position = structure.order.index(block)
    number = bisect_right(structure.marks, position, key=lambda mark: mark.position) - 1
    if number < 0:
        return PeakEvent(position, block, step=-1, stage="", micro_batch=0)
    mark = structure.marks[number]
    return PeakEvent(position, block, mark.step, mark.stage, mark.micro_batch)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The counters of `torch.cuda` when a stage has ended; maxima and retries are since the trace began.

    Its step, stage and micro-batch are the `StageMark`'s.
    """

    step: int
    stage: str
    micro_batch: int
    allocated_bytes: int
    max_allocated_bytes: int
    reserved_bytes: int
    max_reserved_bytes: int
    num_alloc_retries: int = 0


@dataclass(frozen=True, slots=True)
class PeakEvent:
    """The allocation of a block: its position in `TraceStructure.order`, and the stage, empty before the first mark."""

    position: int
    block: int
    step: int
    stage: str
    micro_batch: int


@dataclass(frozen=True, slots=True)
class OomEvent:
    """The allocation that the card had no room for.

    Attributes:
        moment: nothing after it was replayed.
        tried_bytes: the segment this needed from the card.
        reserved_bytes: taken from the card then, after the cache had been released.
        message: as PyTorch would put it.
    """

    moment: PeakEvent
    requested_bytes: int
    tried_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    message: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replayed trace. Running out of memory is part of it, not an exception.

    Attributes:
        allocated_peak: when `max_allocated_bytes` was first reached; None if nothing was allocated.
        reserved_peak: when `max_reserved_bytes` was first reached.
        grown: the blocks for which more was taken from the card than ever before.
        oom: the allocation that failed; None when all of the trace fits.
    """

    stages: tuple[StageMemory, ...]
    max_allocated_bytes: int
    max_reserved_bytes: int
    allocated_peak: PeakEvent | None
    reserved_peak: PeakEvent | None
    num_alloc_retries: int
    grown: tuple[int, ...] = ()
    oom: OomEvent | None = None

    @property
    def fits(self) -> bool:
        return self.oom is None
