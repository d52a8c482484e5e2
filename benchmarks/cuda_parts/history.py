"""The real allocator's history as requests, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.memory_viz import take_snapshot
from batchfinder.simulator.trace import StageMark, Structure, Trace

Event = tuple[str, int, int, str]
"""Action, bytes, address, and for an allocation the innermost lines of Python that asked for it."""

MARKER_BYTES = 100_003
"""The first marker's size; each takes two bytes more than the one before. Tensors of a step are even, or smaller."""

_KEPT = frozenset({"alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"})
_FRAMES = 3
_MACHINERY = ("torch/nn/modules/module.py", "torch/_ops.py", "cuda_parts/", "batchfinder/training/")


@dataclass(slots=True)
class Request:
    """One allocation.

    Attributes:
        position: of the event in the history.
        nbytes: as they were asked for.
        where: the lines of Python that asked, the innermost first.
        released: the position of its release; None if that never came.
    """

    position: int
    nbytes: int
    where: str
    released: int | None = None


def requests_by_stage(events: Sequence[Sequence[Any]]) -> list[list[Request]]:
    """What each stage asked for, without the markers that the stages begin with.

    What comes before the first marker is nobody's, and left out.

    Args:
        events: action, bytes, address and lines, in order.
    """
    stages: list[list[Request]] = []
    live: dict[int, Request] = {}
    for position, (action, nbytes, address, where) in enumerate(events):
        if action == "alloc":
            request = live[address] = Request(position, nbytes, where)
            if nbytes == MARKER_BYTES + 2 * len(stages):
                stages.append([])
            elif stages:
                stages[-1].append(request)
        elif action == "free_completed" and address in live:
            live.pop(address).released = position
    return stages


def read_history(entries: list[dict[str, Any]]) -> list[Event]:
    """The events of one device, as `torch.cuda.memory._snapshot` has them.

    Args:
        entries: one of `device_traces`.
    """
    return [
        (entry["action"], int(entry["size"]), int(entry.get("addr", 0)), _where(entry.get("frames", ())))
        for entry in entries
        if entry["action"] in _KEPT
    ]


def _where(frames: Any) -> str:
    """The innermost frames that are nobody's machinery, the innermost first."""
    shown = []
    for frame in frames:
        filename = str(frame["filename"]).replace("\\", "/")
        if filename and not any(part in filename for part in _MACHINERY):
            shown.append(f"{Path(filename).name}:{frame['line']} {frame['name']}")
        if len(shown) == _FRAMES:
            break
    return " < ".join(shown)


def simulated_history(trace: Trace, allocator: CachingAllocator) -> list[Event]:
    """A recorded step as the history that a real one would leave, markers included.

    Args:
        trace: the step.
        allocator: a new one.
    """
    order: list[int] = []
    marks: list[StageMark] = []
    sizes = list(trace.sizes)
    structure = trace.structure
    ends = [*(mark.position for mark in structure.marks[1:]), len(structure.order)]
    for number, (mark, end) in enumerate(zip(structure.marks, ends, strict=True)):
        marks.append(StageMark(len(order), mark.step, mark.stage, mark.micro_batch))
        order += [len(sizes), ~len(sizes)]
        sizes.append(MARKER_BYTES + 2 * number)
        order += structure.order[mark.position : end]
    more = ("",) * (len(sizes) - len(trace.sizes))
    marked = Structure(
        tuple(order), tuple(marks), structure.operators + more, structure.modules + more, structure.kinds + more
    )
    snapshot = take_snapshot(Trace(trace.batch_size, trace.seq_len, marked, tuple(sizes)), allocator)
    return read_history(snapshot["device_traces"][0])
