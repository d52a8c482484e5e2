"""Whether a step that just fits keeps fitting, and the smallest card on which it does.

Near a card's limit the allocator cannot always go on with the segments it has: it releases those that are wholly free
and takes others. A few steps later it has, as a rule, segments in which every later step fits, and never does it again;
or it runs out of memory in one of those steps. Two steps cannot tell, so the last one is replayed several times more.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import UNLIMITED, CachingAllocator
from batchfinder.simulator.blocks import (
    MIN_BLOCK_BYTES,
    SEGMENT_STEP_BYTES,
    DeviceMemory,
    block_size,
    round_up,
    segment_size,
)
from batchfinder.simulator.replay import Replay, Timeline, replay
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure

MORE_STEPS = 8
"""Steps beyond the first two within which the allocator has to reach a steady state.

Of ResNet-50, BERT-large and DistilBERT on cards with just the memory of some size, each size above that size either
failed in the first four steps or had a step without in the first seven, and no later step of 24 failed.
"""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """A step that was replayed until the allocator kept its cache.

    Attributes:
        timeline: of the trace itself; where only a later step failed, of the longer trace, whose positions differ.
        settled: whether a step ran in which the allocator kept its cache; True where one ran out of memory before.
    """

    timeline: Timeline
    settled: bool = True

    @property
    def fits(self) -> bool:
        return self.timeline.fits and self.settled


def simulate_steady_state(
    structure: TraceStructure, sizes: Sequence[int], allocator: Callable[[], CachingAllocator]
) -> SteadyState:
    """Replay a trace; where the cache was released on the way, its last step `MORE_STEPS` more times.

    Args:
        allocator: returns a new one, made for the card and the settings in question.
    """
    with closing(allocator()) as new:
        run = Replay(structure, sizes, new)
        last = len(structure.marks) - 1
        if last > 0:
            run.run(last)  # in the last stage goes what the steps leave behind
        retried = run.oom is None and run.allocator.num_alloc_retries > 0
        longer = repeat_last_step(structure, MORE_STEPS) if retried else None
        if longer is None:
            run.run()
            return SteadyState(run.timeline())
        timeline = run.timeline(released=True)
        recorded_steps = timeline.stages[-1].step + 1
        run.structure, origins = longer
        run.sizes = [sizes[i] for i in origins]
        for number, mark in enumerate(run.structure.marks):
            if mark.step < recorded_steps or mark.stage != "optimizer":
                continue
            run.run(number + 1)
            if run.oom is not None:
                return SteadyState(run.timeline())
            before = next(stage for stage in reversed(run.stages) if stage.step < mark.step)
            if run.stages[-1].num_alloc_retries == before.num_alloc_retries:
                return SteadyState(timeline)
        run.run()
        return SteadyState(timeline, settled=False) if run.oom is None else SteadyState(run.timeline())


# Stage, micro-batch, operator, module, kind, and the count of earlier blocks that are alike in all of these.
_Site = tuple[str, int, str, str, str, int]


@functools.lru_cache(maxsize=16)  # the step is the same at every size
def repeat_last_step(structure: TraceStructure, times: int) -> tuple[TraceStructure, tuple[int, ...]] | None:
    """A trace whose last step is taken several times more.

    What a step releases of the step before it (gradients, the last batch) is found by its allocation site: the block
    that the same operator of the same module allocated in the same stage.

    Args:
        structure: a trace of two optimizer steps or more.

    Returns:
        The longer trace, and for each of its blocks the number of the recorded block that it repeats, whose size it
        has. None without a second step, or where a step releases a block whose site the step before does not have.
    """
    last = max((mark.step for mark in structure.marks), default=0)
    if last < 1:
        return None
    sites: dict[int, tuple[int, _Site]] = {}  # for each block its step, the model's own being -1, and its site
    seen: Counter[tuple[object, ...]] = Counter()
    ends = chain((mark.position for mark in structure.marks), [len(structure.order)])
    for mark, end in zip([StageMark(0, -1, ""), *structure.marks], ends, strict=True):
        for block in structure.order[mark.position : end]:
            if block >= 0:
                names = structure.operators[block], structure.modules[block], structure.kinds[block]
                alike = (mark.stage, mark.micro_batch, *names)
                sites[block] = mark.step, (*alike, seen[mark.step, alike])
                seen[mark.step, alike] += 1
    blocks = {site: block for block, site in sites.items()}
    start = next(mark.position for mark in structure.marks if mark.step == last)
    end = structure.marks[-1].position
    step = structure.order[start:end]
    completed = [(position, block) for position, block in structure.free_completed if start <= position < end]
    successors: dict[int, int] = {}  # from a block of the step before the last to the same site's in the last
    for block in chain((~event for event in step if event < 0), (block for _, block in completed)):
        number, site = sites[block]
        if number < last:
            successor = blocks.get((last, site)) if number == last - 1 else None
            if successor is None:
                return None
            successors[block] = successor
    order, marks, origins = [*structure.order[:end]], [*structure.marks[:-1]], [*range(len(structure.operators))]
    now = {block: block for block in origins}  # for each recorded block of the last step, the newest that repeats it
    free_completed = [(position, block) for position, block in structure.free_completed if position < end]
    for n in range(1, times + 1):
        marks.extend(
            StageMark(mark.position - start + len(order), last + n, mark.stage, mark.micro_batch)
            for mark in structure.marks[:-1]
            if mark.step == last
        )
        before = {block: now[successor] for block, successor in successors.items()}
        begins = len(order)
        for event in step:
            if event >= 0:
                now[event] = len(origins)
                order.append(len(origins))
                origins.append(event)
            else:
                order.append(~before.get(~event, now[~event]))
        free_completed += [(begins + position - start, before.get(block, now[block])) for position, block in completed]
    marks.append(replace(structure.marks[-1], position=len(order), step=last + times))
    order.extend(~now[~event] for event in structure.order[end:])
    waits = {block for _, block in structure.free_completed}
    done = {block for _, block in free_completed}
    never = [(len(order), block) for block, origin in enumerate(origins) if origin in waits and block not in done]
    longer = TraceStructure(
        tuple(order),
        tuple(marks),
        operators=tuple(structure.operators[i] for i in origins),
        modules=tuple(structure.modules[i] for i in origins),
        kinds=tuple(structure.kinds[i] for i in origins),
        streams=tuple(structure.streams[i] for i in origins) if structure.streams else (),
        free_completed=tuple(sorted([*free_completed, *never])),
    )
    return longer, tuple(origins)


def _blocks_of_last_micro_batch(structure: TraceStructure, step: int) -> set[int]:
    """What is allocated in the last micro-batch of a step."""
    ends = [*(mark.position for mark in structure.marks[1:]), len(structure.order)]
    last = max(mark.micro_batch for mark in structure.marks if mark.step == step)
    return {
        event
        for mark, end in zip(structure.marks, ends, strict=True)
        if (mark.step, mark.micro_batch) == (step, last)
        for event in structure.order[mark.position : end]
        if event >= 0
    }


_SIZES_TRIED_BELOW = 64
"""Sizes under the first answer that are tried as well, in steps of 2 MiB: 128 MiB."""


def smallest_usable_bytes(
    structure: TraceStructure, sizes: Sequence[int], settings: AllocatorSettings, context_bytes: int = 0
) -> int:
    """The least memory in which a trace, and its last step repeated, runs.

    That is less than the most the allocator reserves on a large card: on a full one it releases its cache and goes on.

    Every segment is a multiple of 2 MiB, so only such sizes are tried. Bisection finds one that runs while the one
    below it does not. A trace that runs on one card may fail on a larger one, where the best fitting free block is
    another; so the sizes up to 128 MiB under the answer are tried as well, until none of them runs.

    Args:
        context_bytes: what the card has beside that; it counts for the range of an expandable segment.

    Returns:
        A multiple of 2 MiB. The trace was replayed with this much, on which it reaches a steady state, and with 2 MiB
        less, on which it does not; 0 for a trace that asks for nothing.
    """

    def runs(steps: int) -> bool:
        usable = steps * SEGMENT_STEP_BYTES
        memory = DeviceMemory(usable + context_bytes, usable)
        return simulate_steady_state(structure, sizes, lambda: CachingAllocator(memory, settings)).fits

    alive = most_alive = 0  # each block rounded up to 512 B: a lower bound for any card
    for event in structure.order:
        if event >= 0:
            alive += round_up(sizes[event], MIN_BLOCK_BYTES)
            most_alive = max(most_alive, alive)
        else:
            alive -= round_up(sizes[~event], MIN_BLOCK_BYTES)
    most_reserved = replay(structure, sizes, CachingAllocator(UNLIMITED, settings)).max_reserved_bytes
    floor = low = -(-most_alive // SEGMENT_STEP_BYTES)
    high = -(-most_reserved // SEGMENT_STEP_BYTES)
    while low < high:
        middle = (low + high) // 2
        if runs(middle):
            high = middle
        else:
            low = middle + 1
    while (smaller := next(filter(runs, range(max(floor, high - _SIZES_TRIED_BELOW), high)), None)) is not None:
        high = smaller
    return high * SEGMENT_STEP_BYTES


_CURVE_START = 32
"""Where a card's memory is looked for first on the curve of what sizes need."""
_CURVE_STEPS = 8


class SimulatedProbe:
    """Says whether a size would run on a simulated card.

    Args:
        unmodelled: what any answer leaves out, in words.
        edit: makes of each recorded trace the one that is replayed, such as another version's; None for as it is.
    """

    source = "simulated"

    def __init__(
        self,
        traces: TraceSource,
        memory: DeviceMemory,
        allocator: AllocatorSettings | None = None,
        unmodelled: Iterable[str] = (),
        edit: Callable[[Trace], Trace] | None = None,
    ) -> None:
        self.traces = traces
        self.memory = memory
        self.allocator = allocator or AllocatorSettings()
        self._unmodelled = dict.fromkeys(unmodelled)
        self._edit = edit

    def _new_allocator(self, memory: DeviceMemory) -> CachingAllocator:
        return CachingAllocator(memory, self.allocator)

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
            message = f"the allocator releases all cached memory in each of {MORE_STEPS} more steps (thrashing)"
            return Measurement(Verdict.THRASHING, *peaks, seconds, message)
        return Measurement(Verdict.FITS, *peaks, seconds)

    def timeline(self, batch_size: int, shape: Shape, memory: DeviceMemory | None = None) -> Timeline:
        """The replay of one size, on this card or another."""
        trace = self.trace(batch_size, shape)
        with closing(self._new_allocator(memory or self.memory)) as allocator:
            return replay(trace.structure, trace.sizes, allocator)

    def unlimited(self, batch_size: int, shape: Shape) -> Timeline:
        """The replay of one size on a card with unlimited memory, which all cards share where the trace is scaled."""
        replays, key = self._shared_replays(batch_size, shape), self._key(batch_size, shape)
        if key not in replays:
            replays[key] = self.timeline(batch_size, shape, UNLIMITED)
        timeline: Timeline = replays[key]
        return timeline

    def needed_bytes(self, batch_size: int, shape: Shape) -> int:
        """The most the allocator would reserve for a size on a card with unlimited memory."""
        return self.unlimited(batch_size, shape).max_reserved_bytes

    def reserved_over(self, batch_size: int, shape: Shape, later: Sequence[int | None]) -> int:
        """The most that is reserved over the recorded steps and later ones, on a card with unlimited memory.

        Smaller batches and an emptied cache leave segments in which the next full step does not fit.

        Args:
            later: for each further step the samples of its last micro-batch; None where the cache is emptied.
        """
        trace = self.trace(batch_size, shape)
        steps = [size for size in later if size is not None]
        longer = repeat_last_step(trace.structure, len(steps)) if steps else None
        if longer is None:
            return self.needed_bytes(batch_size, shape)
        structure, origins = longer
        sizes = [trace.sizes[i] for i in origins]
        last = max(mark.step for mark in trace.structure.marks)
        in_last_micro_batch = _blocks_of_last_micro_batch(trace.structure, last)
        repeated = (len(origins) - len(trace.sizes)) // len(steps)
        for number, samples in enumerate(steps):
            smaller = trace if samples == batch_size else self.trace(max(2, samples), shape)
            if smaller is not trace and smaller.structure == trace.structure:
                first = len(trace.sizes) + number * repeated
                for block in range(first, first + repeated):
                    if origins[block] in in_last_micro_batch:
                        sizes[block] = smaller.sizes[origins[block]]
        starts: dict[int, int] = {}
        for number, mark in enumerate(structure.marks):
            starts.setdefault(mark.step, number)
        with closing(self._new_allocator(UNLIMITED)) as allocator:
            run, step = Replay(structure, sizes, allocator), last
            for each in later:
                if each is not None:
                    step += 1
                elif step - last < len(steps):
                    run.run(starts[step + 1])
                    allocator.empty_cache()
            run.run()
            return allocator.max_reserved

    def steady_state(self, batch_size: int, shape: Shape, exact: bool = False) -> SteadyState:
        """One size replayed until the allocator's cache is steady; `exact` as for `trace`.

        What never reserves more than this card has is replayed on it as on one with unlimited memory: an allocator that
        calls cudaMalloc for each segment reads a card's size only where that fails.
        """
        key = self._key(batch_size, shape)
        shared = {} if exact or self.allocator.expandable_segments else self._shared_replays(batch_size, shape)
        trace = self.trace(batch_size, shape, exact)
        if key in shared and shared[key].max_reserved_bytes <= self.memory.capacity_bytes:
            return SteadyState(shared[key])
        steady: SteadyState | None = shared.get((*key, self.memory))
        if steady is None:
            steady = simulate_steady_state(trace.structure, trace.sizes, lambda: self._new_allocator(self.memory))
            shared[*key, self.memory] = steady
            if steady.timeline.fits and not steady.timeline.num_alloc_retries:
                shared[key] = steady.timeline
        return steady

    def segment_bytes(self, blocks: Iterable[int], shape: Shape) -> Callable[[int], int]:
        """What segments for these blocks take together, as a function of the batch size, of at least 2."""
        settings, length = self.allocator, shape.seq_len or 1
        blocks = list(blocks)
        alike = None if self._edit is not None else Counter(self.traces.polynomials_of(blocks, shape.seq_len))

        def segments(batch_size: int) -> int:
            if alike is None:
                sizes = self.trace(batch_size, shape).sizes
                counts = Counter(sizes[block] for block in blocks)
            else:
                counts = Counter()
                for terms, count in alike.items():
                    counts[sum(term(batch_size, length) for term in terms)] += count
            return sum(count * segment_size(block_size(size, settings), settings) for size, count in counts.items())

        return segments

    def _key(self, batch_size: int, shape: Shape) -> tuple[Any, ...]:
        """The key of this replay in the dictionary that all cards share."""
        return batch_size, shape.seq_len, self.allocator

    def _shared_replays(self, batch_size: int, shape: Shape) -> dict[Any, Any]:
        return {} if self._edit is not None else self.traces.replays(batch_size, shape.seq_len)

    def trace(self, batch_size: int, shape: Shape, exact: bool = False) -> Trace:
        """The step's trace at one size.

        Args:
            exact: recorded at this very size, which is quicker where one size is all that is asked for.
        """
        at = self.traces.recorded if exact else self.traces.at
        trace = at(batch_size, shape.seq_len)
        self._unmodelled.update(dict.fromkeys(trace.unmodelled))
        return trace if self._edit is None else self._edit(trace)


def predict_max_batch_size(probe: SimulatedProbe, shape: Shape) -> int:
    """A guess to start a search from: where a line through two sizes crosses the card's capacity, in the first stage.

    At small sizes the peak may be the optimizer's, which takes the same at each; the forward's line is steeper.

    Returns:
        A size of at least 2, as a batch of one needs a recording of its own; where each size does, of at least 1.
    """
    small, large = probe.traces.two_sizes(shape.seq_len)
    low, high = (probe.trace(size, shape).most_held() for size in (small, large))
    # Blocks are a little larger than what they hold.
    filled = probe.unlimited(large, shape).max_allocated_bytes - max(high)
    room = probe.memory.capacity_bytes - filled
    pairs = zip(low, high, strict=True) if len(low) == len(high) else [(max(low), max(high))]
    rises = [(first, (second - first) / (large - small)) for first, second in pairs if second > first]
    if not rises:
        return large
    crossing = min(math.floor(small + (room - first) / per_sample) for first, per_sample in rises)
    return max(2 if probe.traces.is_scaled(shape.seq_len) else 1, crossing)


def fill_card(probe: SimulatedProbe, shape: Shape, largest: int) -> tuple[int, int]:
    """The size at which a card's memory is full if none of it is ever given back, and one that may run if it is.

    It is looked for between two powers of two, on `SimulatedProbe.unlimited`, which is the same for all cards. From one
    size to another nearby, what is reserved changes by the segments of the same blocks.

    Args:
        largest: no larger size is looked at.

    Returns:
        The size up to which no more is reserved than there is, at least 2, as a batch of one needs a recording of its
        own; and where a line through what the two powers of two have allocated meets the card's memory, at least that.
    """
    room, most = probe.memory.capacity_bytes, max(2, largest)
    low = high = min(_CURVE_START, most)
    low_seen = high_seen = probe.unlimited(low, shape)
    while low_seen.max_reserved_bytes > room:
        if low == 2:
            return 2, 2
        low, high, high_seen = max(2, low // 2), low, low_seen
        low_seen = probe.unlimited(low, shape)
    while high_seen.max_reserved_bytes <= room:
        if high == most:
            return most, most
        low, low_seen, high = high, high_seen, min(2 * high, most)
        high_seen = probe.unlimited(high, shape)
    rise = (high_seen.max_allocated_bytes - low_seen.max_allocated_bytes) / (high - low)
    left = room - low_seen.max_allocated_bytes
    filled = min(most, low + math.floor(left / rise)) if rise > 0 else most
    near = start = low
    seen = low_seen
    for _ in range(_CURVE_STEPS):
        segments = probe.segment_bytes(seen.grown, shape)
        extra = seen.max_reserved_bytes - segments(near)
        below, above = low, high  # by the segments of the size that was looked at last
        while above - below > 1:
            middle = (below + above) // 2
            if extra + segments(middle) <= room:
                below = middle
            else:
                above = middle
        if below == low:
            if near == low != start or high - low == 1:
                break
            below = (low + high) // 2  # segments of the blocks that another size has told too little of the next one
        near, seen = below, probe.unlimited(below, shape)
        if seen.max_reserved_bytes <= room:
            low = near
        else:
            high = near
    return low, max(low, filled)
