"""Memory over the last steps of a process, by what holds it, from the history that PyTorch's allocator keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from batchfinder.programs.peak import AliveBlock, AllocatorHistory, rounded

_KIND_OF_PHASE = {"forward": "activations", "other": "inputs"}
_KIND_OF_TENSOR = {"weights": "parameters", "optimizer state": "optimizer"}


@dataclass(slots=True)
class _Held:
    """A block, and what it turns out to hold."""

    size: int
    kind: str
    line: str
    phase: str = "other"


def memory_timeline(
    history: AllocatorHistory,
    first: int,
    *,
    known: Mapping[int, str],
    gradients: Mapping[int, Set[int]],
    phase_of: Callable[[AliveBlock], str],
    line_of: Callable[[AliveBlock], str],
    step_of: Callable[[int], int],
) -> dict[str, Any]:
    """Memory after each event from number `first` on.

    Args:
        history: of one card.
        first: the number of an event.
        known: what tensors are for that are alive at the end of the history, by their addresses.
        gradients: the addresses of gradients, by the number of the event before which they are there.
        phase_of: what was going on as a block was allocated.
        line_of: the user's line that allocated it.
        step_of: the step that an event is of.

    Returns:
        `by_kind`: bytes after each event; `lines`: the user's line that allocated what each event allocates or
        releases; `marks`: number of the event, step and stage wherever these change. Events are numbered from `first`.
    """

    def hold(block: AliveBlock) -> _Held:
        phase = phase_of(block)
        return _Held(block.size, _KIND_OF_PHASE.get(phase, "temporary"), line_of(block), phase)

    blocks = history.alive(first)
    alive = {address: hold(block) for address, block in blocks.items()}
    start = list(alive.values())
    last = max((place for place in gradients if place <= first), default=0)
    for address in gradients.get(last, ()):  # the last step's, which are released in the next
        if address in blocks and (blocks[address].event or 0) < last:
            alive[address].kind = "gradients"
    changes: list[tuple[int, _Held]] = []
    for number, event in enumerate(history.events[first:], first):
        for address in gradients.get(number, ()):
            if address in alive:
                alive[address].kind = "gradients"
        if event["action"] == "alloc":
            noted = event.get("user_metadata") or ""
            held = hold(AliveBlock(rounded(event["size"]), number, noted, event.get("frames", ())))
            alive[event["addr"]] = held
            changes.append((held.size, held))
        else:
            held = alive.pop(event["addr"], _Held(0, "inputs", ""))
            changes.append((-held.size, held))
    for address, kind in known.items():
        if address in alive:
            alive[address].kind = _KIND_OF_TENSOR.get(kind, kind)

    now = {held.kind: 0 for held in (*start, *(held for _, held in changes))}
    for held in start:
        now[held.kind] += held.size
    by_kind: dict[str, list[int]] = {kind: [] for kind in now}
    lines: list[str] = []
    marks: list[tuple[int, int, str]] = []
    stage = "forward"
    for number, (change, held) in enumerate(changes):
        now[held.kind] += change
        for kind, size in now.items():
            by_kind[kind].append(size)
        lines.append(held.line)
        if change > 0 and held.phase != "other":
            stage = held.phase
        step = step_of(first + number)
        if not marks or marks[-1][1:] != (step, stage):
            marks.append((number, step, stage))
    return {"by_kind": by_kind, "lines": lines, "marks": marks}
