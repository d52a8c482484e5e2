"""Whether a step that only just fits goes on fitting.

Near a card's limit the allocator cannot always go on from the segments it has: it gives back those that are wholly free
and takes others. A few steps later it has, as a rule, segments in which every later step fits, and it never does it
again; or it finds no room in one of those steps. Two steps cannot tell.

A recorded step taken more often than it was recorded.

The smallest card on which a recorded step goes on running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import UNLIMITED, CachingAllocator
from batchfinder.simulator.blocks import MIN_BLOCK_BYTES, SEGMENT_STEP_BYTES, DeviceMemory, round_up
from batchfinder.simulator.replay import StageMemory, Timeline, replay
from batchfinder.simulator.trace import StageMark, Structure

MORE_STEPS = 8
"""Steps beyond the first two in which the allocator has to be through with it.

Of ResNet-50, BERT-large and DistilBERT on cards with just the memory of some size, each size above that size either
failed in the first four steps or had a step without in the first seven, and no later step of 24 failed.
"""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """What becomes of a step that is taken again and again.

    Attributes:
        timeline: the trace's own, or the longer one in which it failed, whose moments are not the trace's.
        settled: whether a step went by in which the allocator kept its cache; True where one failed before.
    """

    timeline: Timeline
    settled: bool = True

    @property
    def fits(self) -> bool:
        """Whether it goes on fitting."""
        return self.timeline.fits and self.settled


def outlook(structure: Structure, sizes: Sequence[int], allocator: Callable[[], CachingAllocator]) -> SteadyState:
    """Replay a trace; where the cache was given back on the way, with its last step `MORE_STEPS` more times.

    Args:
        structure: the events.
        sizes: for each block, the bytes asked for.
        allocator: returns a new one, made for the card and the settings in question.
    """
    timeline = replay(structure, sizes, allocator())
    if not timeline.fits or not timeline.num_alloc_retries:
        return SteadyState(timeline)
    longer = repeated(structure, MORE_STEPS)
    if longer is None:
        return SteadyState(timeline)
    steps = timeline.stages[-1].step + 1
    structure, origins = longer
    later = replay(structure, [sizes[i] for i in origins], allocator(), lambda stages: _kept(stages, steps))
    return SteadyState(timeline, _kept(later.stages, steps)) if later.fits else SteadyState(later)


def _kept(stages: Sequence[StageMemory], steps: int) -> bool:
    """Whether the last optimizer step, if it comes after so many others and has ended, did with the cache there was."""
    last = stages[-1]
    if last.step < steps or last.stage != "optimizer":
        return False
    before = next(stage for stage in reversed(stages) if stage.step < last.step)
    return last.num_alloc_retries == before.num_alloc_retries


# Stage, micro-batch, operator, module, kind, and which of those that are alike in all of these.
_Place = tuple[str, int, str, str, str, int]


def repeated(structure: Structure, times: int) -> tuple[Structure, tuple[int, ...]] | None:
    """A trace's last step again and again.

    What a step releases of the step before it (gradients, the last batch) is found by its place: the block that the
    same operator of the same module allocated in the same stage.

    Args:
        structure: a trace of two optimizer steps or more.
        times: how often to take its last step once more.

    Returns:
        The longer trace, and for each of its blocks the number of the recorded block that it repeats, whose size it
        has. None where that cannot be told: there is no second step, or a step releases what has no such place.
    """
    last = max((mark.step for mark in structure.marks), default=0)
    if last < 1:
        return None
    places = dict(_places(structure))
    blocks = {place: block for block, place in places.items()}
    start = next(mark.position for mark in structure.marks if mark.step == last)
    end = structure.marks[-1].position
    step = structure.order[start:end]
    successors: dict[int, int] = {}  # of a block of the step before the last: the one that takes its part in the last
    for block in (~event for event in step if event < 0):
        number, place = places[block]
        if number < last:
            heir = blocks.get((last, place)) if number == last - 1 else None
            if heir is None:
                return None
            successors[block] = heir
    order, marks, origins = [*structure.order[:end]], [*structure.marks[:-1]], [*range(len(structure.operators))]
    now = {block: block for block in origins}  # for each recorded block of the last step, the newest that repeats it
    for n in range(1, times + 1):
        marks.extend(
            StageMark(mark.position - start + len(order), last + n, mark.stage, mark.micro_batch)
            for mark in structure.marks[:-1]
            if mark.step == last
        )
        before = {block: now[heir] for block, heir in successors.items()}
        for event in step:
            if event >= 0:
                now[event] = len(origins)
                order.append(len(origins))
                origins.append(event)
            else:
                order.append(~before.get(~event, now[~event]))
    marks.append(replace(structure.marks[-1], position=len(order), step=last + times))
    order.extend(~now[~event] for event in structure.order[end:])
    longer = Structure(
        tuple(order),
        tuple(marks),
        *(tuple(names[i] for i in origins) for names in (structure.operators, structure.modules, structure.kinds)),
    )
    return longer, tuple(origins)


def _places(structure: Structure) -> Iterator[tuple[int, tuple[int, _Place]]]:
    """Each block, with the step and the place at which it was allocated; the model's own at step -1."""
    starts = [StageMark(0, -1, ""), *structure.marks]
    ends = chain((mark.position for mark in structure.marks), [len(structure.order)])
    seen: Counter[tuple[object, ...]] = Counter()
    for mark, end in zip(starts, ends, strict=True):
        for block in structure.order[mark.position : end]:
            if block >= 0:
                names = structure.operators[block], structure.modules[block], structure.kinds[block]
                alike = (mark.stage, mark.micro_batch, *names)
                yield block, (mark.step, (*alike, seen[mark.step, alike]))
                seen[mark.step, alike] += 1


# How many sizes under the first answer are looked at for a smaller one: 128 MiB.
_LOOKED_AT = 64


def smallest_usable_bytes(
    structure: Structure, sizes: Sequence[int], settings: AllocatorSettings, context_bytes: int = 0
) -> int:
    """The least memory that the allocator has to have for a trace to run, and its last step again and again.

    That is less than the most it reserves on a large card: a full card makes it give its cache back and go on.

    Every segment is a multiple of 2 MiB, so only such sizes are tried. Bisection finds one that runs while the one
    below it does not. A trace that runs on one card may fail on a larger one, where another segment is at hand when a
    block is looked for; so the sizes up to 128 MiB under the answer are tried as well, until none of them runs.

    Args:
        structure: the events.
        sizes: for each block, the bytes asked for.
        settings: the caching allocator's.
        context_bytes: what the card has beside that, which an expandable segment's range is made for.

    Returns:
        A multiple of 2 MiB. The trace was replayed with this much, on which it settles (`outlook`), and with 2 MiB
        less, on which it does not; 0 for a trace that asks for nothing.
    """

    def runs(steps: int) -> bool:
        usable = steps * SEGMENT_STEP_BYTES
        memory = DeviceMemory(usable + context_bytes, usable)
        return outlook(structure, sizes, lambda: CachingAllocator(memory, settings)).fits

    most = replay(structure, sizes, CachingAllocator(UNLIMITED, settings)).max_reserved_bytes
    least = _most_alive(structure, sizes)
    low, high = -(-least // SEGMENT_STEP_BYTES), round_up(most, SEGMENT_STEP_BYTES) // SEGMENT_STEP_BYTES
    floor = low
    while low < high:
        middle = (low + high) // 2
        if runs(middle):
            high = middle
        else:
            low = middle + 1
    while (smaller := _first(runs, max(floor, high - _LOOKED_AT), high)) is not None:
        high = smaller
    return high * SEGMENT_STEP_BYTES


def _first(runs: Callable[[int], bool], low: int, high: int) -> int | None:
    """The first of some sizes, from below, that runs."""
    return next((steps for steps in range(low, high) if runs(steps)), None)


def _most_alive(structure: Structure, sizes: Sequence[int]) -> int:
    """The most bytes alive at one time, each block rounded up as every allocator must: no card can do with less."""
    alive = most = 0
    for event in structure.order:
        if event >= 0:
            alive += round_up(sizes[event], MIN_BLOCK_BYTES)
            most = max(most, alive)
        else:
            alive -= round_up(sizes[~event], MIN_BLOCK_BYTES)
    return most
