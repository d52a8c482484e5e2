"""Run a recorded step through the simulated allocator: memory by stage, the peaks, and where it ran out of memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, SimulatedOutOfMemory
from batchfinder.simulator.trace import StageMark, TraceStructure


def replay(structure: TraceStructure, sizes: Sequence[int], allocator: CachingAllocator) -> Timeline:
    """Replay a trace.

    Args:
        sizes: for each block, the bytes asked for. They may be of another size than the recorded one.
        allocator: a new one, made for the card and the settings in question. It is left as the trace leaves it.

    Returns:
        The counters at the end of each stage, the peaks, and the failure if the card is too small.
    """
    run = Replay(structure, sizes, allocator)
    run.run()
    return run.timeline()


class Replay:
    """A trace that is replayed bit by bit; arguments as for `replay`.

    Attributes:
        structure, sizes: of the trace. A longer one that begins with all that has been replayed may take their place.
        allocator: as the trace leaves it so far.
        stages: those that have ended.
        oom: the allocation that failed, after which nothing is replayed.
    """

    def __init__(self, structure: TraceStructure, sizes: Sequence[int], allocator: CachingAllocator) -> None:
        self.structure = structure
        self.sizes = sizes
        self.stages: list[StageMemory] = []
        self.oom: OomEvent | None = None
        self.allocator = allocator
        self._live: dict[int, Block | None] = {}
        self._begun = 0  # of the marks
        self._position = 0
        self._allocated_peak = self._reserved_peak = -1
        self._grown: list[int] = []

    def run(self, stages: int | None = None) -> None:
        """Go on until so many stages have ended in all, or to the trace's end; not at all where memory has run out."""
        if self.oom is not None:
            return
        structure, sizes, live, allocator = self.structure, self.sizes, self._live, self.allocator
        order, marks, streams = structure.order, structure.marks, structure.streams
        allocate, free, taken = allocator.allocate, allocator.free, allocator.taken
        most_allocated, most_reserved = allocator.max_allocated, taken.peak
        ends = [*(mark.position for mark in marks), len(order)]
        stops = _frees_after_streams(structure)
        i = -1
        try:
            for number in range(self._begun, len(ends) if stages is None else stages + 1):
                within = [stop for stop in stops if self._position <= stop.position < ends[number]]
                for stop in (*within, _Stop(ends[number])):
                    for i in order[self._position : stop.position]:
                        if i < 0:
                            free(live[~i])
                            continue
                        live[i] = allocate(sizes[i], streams[i]) if streams else allocate(sizes[i])
                        if allocator.max_allocated > most_allocated:
                            most_allocated = allocator.max_allocated
                            self._allocated_peak = i
                        if taken.peak > most_reserved:
                            most_reserved = taken.peak
                            self._reserved_peak = i
                            self._grown.append(i)
                    self._position = stop.position
                    if stop.block >= 0 and stop.completes:
                        allocator.complete_free(live[stop.block])
                    elif stop.block >= 0:
                        allocator.request_free(live[stop.block])
                        self._position += 1
                self._begun = number + 1
                if number:
                    self.stages.append(self._stage(marks[number - 1], allocator.allocated))
        except SimulatedOutOfMemory as error:
            self.oom = OomEvent(
                moment=_peak_event(structure, i),
                requested_bytes=error.requested_bytes,
                tried_bytes=error.tried_bytes,
                allocated_bytes=error.allocated_bytes,
                reserved_bytes=error.reserved_bytes,
                message=str(error),
            )

    def _stage(self, mark: StageMark, allocated_bytes: int) -> StageMemory:
        allocator = self.allocator
        return StageMemory(
            step=mark.step,
            stage=mark.stage,
            micro_batch=mark.micro_batch,
            allocated_bytes=allocated_bytes,
            max_allocated_bytes=allocator.max_allocated,
            reserved_bytes=allocator.reserved,
            max_reserved_bytes=allocator.max_reserved,
            num_alloc_retries=allocator.num_alloc_retries,
        )

    def timeline(self, released: bool = False) -> Timeline:
        """What has been seen so far.

        Args:
            released: with the trace's last stage, of which all releases are to come and nothing else.
        """
        structure, stages, allocator = self.structure, self.stages, self.allocator
        if released:
            left = [self._live[~event] for event in structure.order[self._position :]]
            allocated = allocator.allocated - sum(block.size for block in left if block is not None)
            stages = [*stages, self._stage(structure.marks[-1], allocated)]
        peaks = self._allocated_peak, self._reserved_peak
        allocated_peak, reserved_peak = (None if block < 0 else _peak_event(structure, block) for block in peaks)
        return Timeline(
            stages=tuple(stages),
            max_allocated_bytes=allocator.max_allocated,
            max_reserved_bytes=allocator.max_reserved,
            allocated_peak=allocated_peak,
            reserved_peak=reserved_peak,
            num_alloc_retries=allocator.num_alloc_retries,
            grown=tuple(self._grown),
            oom=self.oom,
        )


class _Stop(NamedTuple):
    """Where a replay does what no event of `TraceStructure.order` says.

    Attributes:
        block: that other streams have used: it is released by the event at this position, or if `completes` is free
            before it; -1 where a stage ends.
    """

    position: int
    block: int = -1
    completes: bool = False


def _frees_after_streams(structure: TraceStructure) -> list[_Stop]:
    if not structure.free_completed:
        return []
    blocks = {block for _, block in structure.free_completed}
    released = [_Stop(at, ~event) for at, event in enumerate(structure.order) if event < 0 and ~event in blocks]
    completed = [_Stop(at, block, completes=True) for at, block in structure.free_completed]
    return sorted([*completed, *released], key=lambda stop: stop.position)


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
