"""Blocks put into a recorded trace: what a step would hold besides, had it been taken otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from batchfinder.simulator.trace import Mark, Structure, Trace


@dataclass(frozen=True, slots=True)
class AddedBlock:
    """One block to be put in.

    Attributes:
        size: the bytes asked for.
        start: it is allocated just before the event at this position, in the stage that holds it.
        end: it is released just before the event at this position; None when it stays to the end.
        kind: what it is for.
        operator: what makes it.
        module: where it belongs.
    """

    size: int
    start: int
    end: int | None
    kind: str
    operator: str
    module: str = ""


def with_added(trace: Trace, added: Iterable[AddedBlock]) -> Trace:
    """A trace with more blocks in it. Blocks are numbered anew, in the order in which they are allocated.

    Args:
        trace: as recorded.
        added: in the order in which those with one start are allocated. At one position releases go first.

    Raises:
        ValueError: a block would be released where it is allocated, or before.
    """
    added = tuple(added)
    structure = trace.structure
    old = len(trace.sizes)
    at: dict[int, list[int]] = {}
    for number, block in enumerate(added):
        if block.end is not None:
            if block.end <= block.start:
                raise ValueError(f"a block allocated at {block.start} cannot be released at {block.end}")
            at.setdefault(block.end, []).append(~(old + number))
    for number, block in enumerate(added):
        at.setdefault(block.start, []).append(old + number)
    order: list[int] = []
    moved: list[int] = []  # where each position of the old order, and its end, has gone
    for position in range(len(structure.order) + 1):
        moved.append(len(order))
        order += at.get(position, ())
        order += structure.order[position : position + 1]
    numbers: dict[int, int] = {}
    for event in order:
        if event >= 0:
            numbers[event] = len(numbers)
    before = list(numbers)  # the old number of each new one

    def merged(names: tuple[str, ...], more: list[str]) -> tuple[str, ...]:
        both = (*names, *more)
        return tuple([both[number] for number in before])

    sizes = (*trace.sizes, *(block.size for block in added))
    return replace(
        trace,
        structure=Structure(
            order=tuple([numbers[event] if event >= 0 else ~numbers[~event] for event in order]),
            marks=tuple(
                Mark(moved[mark.position], mark.step, mark.stage, mark.micro_batch) for mark in structure.marks
            ),
            operators=merged(structure.operators, [block.operator for block in added]),
            modules=merged(structure.modules, [block.module for block in added]),
            kinds=merged(structure.kinds, [block.kind for block in added]),
        ),
        sizes=tuple([sizes[number] for number in before]),
        shapes=merged(trace.shapes, [""] * len(added)) if trace.shapes else (),
    )
