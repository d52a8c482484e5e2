"""A recorded step taken more often than it was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from batchfinder.simulator.trace import Mark, Structure

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
    heirs: dict[int, int] = {}  # of a block of the step before the last: the one that takes its part in the last
    for block in (~event for event in step if event < 0):
        number, place = places[block]
        if number < last:
            heir = blocks.get((last, place)) if number == last - 1 else None
            if heir is None:
                return None
            heirs[block] = heir
    order, marks, origins = [*structure.order[:end]], [*structure.marks[:-1]], [*range(len(structure.operators))]
    now = {block: block for block in origins}  # for each recorded block of the last step, the newest that repeats it
    for n in range(1, times + 1):
        marks.extend(
            Mark(mark.position - start + len(order), last + n, mark.stage, mark.micro_batch)
            for mark in structure.marks[:-1]
            if mark.step == last
        )
        before = {block: now[heir] for block, heir in heirs.items()}
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
    starts = [Mark(0, -1, ""), *structure.marks]
    ends = chain((mark.position for mark in structure.marks), [len(structure.order)])
    seen: Counter[tuple[object, ...]] = Counter()
    for mark, end in zip(starts, ends, strict=True):
        for block in structure.order[mark.position : end]:
            if block >= 0:
                names = structure.operators[block], structure.modules[block], structure.kinds[block]
                alike = (mark.stage, mark.micro_batch, *names)
                yield block, (mark.step, (*alike, seen[mark.step, alike]))
                seen[mark.step, alike] += 1
