"""A recorded step, replayed stage by stage and compared with the memory history of a real allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, SimulatedOutOfMemory
from batchfinder.simulator.memory_viz import take_snapshot
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure

Stage = dict[str, Any]
COUNTERS = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes")

Event = tuple[str, int, int, str]
"""Action, bytes, address, and for an allocation the innermost lines of Python that asked for it."""

MARKER_BYTES = 100_003
"""Each stage of a measured step begins with the allocation of a marker, whose odd size no tensor of the step has: this
many bytes, and two more for each later stage."""

_KEPT = frozenset({"alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"})
_FRAMES = 3
_LIBRARY_FRAMES = ("torch/nn/modules/module.py", "torch/_ops.py", "benchmarks/cuda/", "batchfinder/training/")
_SHOWN = 12
_MAX_DIFFERENCES = 3000


def stage_figures(step: int, name: str, micro_batch: int, counters: tuple[int, int, int, int]) -> Stage:
    """One stage's figures as JSON values.

    Args:
        step: which optimizer step; -1 while the model is moved.
        name: `model`, `forward`, ...
        micro_batch: which of the step.
        counters: in the order of `COUNTERS`; the peaks are the stage's own.
    """
    return {"step": step, "stage": name, "micro_batch": micro_batch, **dict(zip(COUNTERS, counters, strict=True))}


def replay_stages(trace: Trace, allocator: CachingAllocator) -> tuple[list[Stage], str]:
    """Replay a trace on a new allocator, resetting its peaks at the start of each stage.

    Returns:
        The stages that ended, and the out-of-memory message, if any.
    """
    structure = trace.structure
    live: dict[int, Block | None] = {}
    stages: list[Stage] = []
    for mark, end in zip(structure.marks, _stage_ends(structure), strict=True):
        allocator.reset_peak()
        for event in structure.order[mark.position : end]:
            if event < 0:
                allocator.free(live.pop(~event))
                continue
            try:
                live[event] = allocator.allocate(trace.sizes[event])
            except SimulatedOutOfMemory as error:
                return stages, str(error)
        counters = (allocator.allocated, allocator.max_allocated, allocator.reserved, allocator.max_reserved)
        stages.append(stage_figures(mark.step, mark.stage, mark.micro_batch, counters))
    return stages, ""


def _stage_ends(structure: TraceStructure) -> list[int]:
    return [*(mark.position for mark in structure.marks[1:]), len(structure.order)]


def peaks(stages: list[Stage]) -> dict[str, int]:
    """The peaks over all stages, of which there is at least one."""
    return {name: max(stage[name] for stage in stages) for name in ("peak_allocated_bytes", "peak_reserved_bytes")}


def predicted_and_measured(predicted: list[Stage], measured: list[Stage]) -> list[dict[str, Any]]:
    """Both figures of each stage that is in both lists."""
    keys = ("step", "stage", "micro_batch")
    by_key = {tuple(stage[key] for key in keys): stage for stage in measured}
    rows = []
    for stage in predicted:
        other = by_key.get(tuple(stage[key] for key in keys))
        if other is not None:
            figures = {name: [stage[name], other[name]] for name in COUNTERS}
            rows.append({**{key: stage[key] for key in keys}, "predicted_and_measured": figures})
    return rows


def read_history(entries: list[dict[str, Any]]) -> list[Event]:
    """The events of one device, from its list in `device_traces` of `torch.cuda.memory._snapshot`."""
    return [
        (entry["action"], int(entry["size"]), int(entry.get("addr", 0)), _user_lines(entry.get("frames", ())))
        for entry in entries
        if entry["action"] in _KEPT
    ]


def _user_lines(frames: Any) -> str:
    """The innermost frames outside of `_LIBRARY_FRAMES`, the innermost first."""
    shown: list[str] = []
    for frame in frames:
        filename = str(frame["filename"]).replace("\\", "/")
        if filename and not any(part in filename for part in _LIBRARY_FRAMES):
            shown.append(f"{Path(filename).name}:{frame['line']} {frame['name']}")
        if len(shown) == _FRAMES:
            break
    return " < ".join(shown)


def simulated_history(trace: Trace, allocator: CachingAllocator) -> list[Event]:
    """The history that a trace would leave on a new allocator, markers included."""
    order: list[int] = []
    marks: list[StageMark] = []
    sizes = list(trace.sizes)
    structure = trace.structure
    for number, (mark, end) in enumerate(zip(structure.marks, _stage_ends(structure), strict=True)):
        marks.append(StageMark(len(order), mark.step, mark.stage, mark.micro_batch))
        order += [len(sizes), ~len(sizes)]
        sizes.append(MARKER_BYTES + 2 * number)
        order += structure.order[mark.position : end]
    more = ("",) * (len(sizes) - len(trace.sizes))
    marked = TraceStructure(
        tuple(order), tuple(marks), structure.operators + more, structure.modules + more, structure.kinds + more
    )
    snapshot = take_snapshot(Trace(trace.batch_size, trace.seq_len, marked, tuple(sizes)), allocator)
    return read_history(snapshot["device_traces"][0])


@dataclass(slots=True)
class Request:
    """One allocation in a history.

    Attributes:
        position: of its event in the history.
        nbytes: as requested, before rounding.
        where: the lines of Python that asked for it.
        released: the position of its release; None if it was not released.
    """

    position: int
    nbytes: int
    where: str
    released: int | None = None


def _requests_by_stage(events: Sequence[Sequence[Any]]) -> list[list[Request]]:
    """Each stage's allocations without its marker; those before the first marker are left out."""
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


def _blocks_by_stage(trace: Trace) -> list[tuple[str, list[int]]]:
    """The blocks that each stage allocates, less those of no bytes, which `NativeCachingAllocator::allocate` skips."""
    structure = trace.structure
    return [
        (
            f"{mark.stage} of step {mark.step}" if mark.step >= 0 else mark.stage,
            [event for event in structure.order[mark.position : end] if event >= 0 and trace.sizes[event]],
        )
        for mark, end in zip(structure.marks, _stage_ends(structure), strict=True)
    ]


def align(one: Sequence[int], other: Sequence[int], limit: int = _MAX_DIFFERENCES) -> list[tuple[int, int]] | None:
    """Pairs of positions with equal values, in order: a longest common subsequence.

    E. Myers, An O(ND) Difference Algorithm and Its Variations, Algorithmica 1 (1986), figure 2: the furthest point that
    each diagonal reaches with d differences, from which the path is read backwards.

    Returns:
        The pairs; None where the two differ in more than `limit` places.
    """
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    for differences in range(min(limit, len(one) + len(other)) + 1):
        history.append(dict(furthest))
        for diagonal in range(-differences, differences + 1, 2):
            before = _diagonal_before(furthest, diagonal, differences)
            x = furthest[before] + (before < diagonal)
            y = x - diagonal
            while x < len(one) and y < len(other) and one[x] == other[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= len(one) and y >= len(other):
                return _read_back(history, x, y)
    return None


def _diagonal_before(furthest: dict[int, int], diagonal: int, differences: int) -> int:
    """The neighbour from which this diagonal's furthest point is reached: the one above it by a step down."""
    down = diagonal == -differences or (
        diagonal != differences and furthest.get(diagonal - 1, -1) < furthest.get(diagonal + 1, -1)
    )
    return diagonal + 1 if down else diagonal - 1


def _read_back(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for differences in range(len(history) - 1, -1, -1):
        before = _diagonal_before(history[differences], x - y, differences)
        start_x = history[differences][before] if differences else 0
        start_y = start_x - before if differences else 0
        while x > start_x and y > start_y:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = start_x, start_y
    return pairs[::-1]


def compare(trace: Trace, events: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """What a recorded step misses of a history and what it has too much, as JSON values.

    Both are lists of requests in order, compared stage by stage. Requests of equal size in equal order are taken to be
    the same. Requests left over in the history (workspaces, temporaries of kernels) are missed by the recording, and
    reported with the operator of the matched request before them.

    Raises:
        ValueError: the two have a different number of stages.
    """
    real = _requests_by_stage(events)
    recorded = _blocks_by_stage(trace)
    if len(real) != len(recorded):
        raise ValueError(f"the history has {len(real)} stages, the recording {len(recorded)}")
    missed: list[tuple[str, str, int, str]] = []
    extra: list[tuple[str, str, int, str]] = []
    pairs: list[tuple[int, Request]] = []
    not_compared = []
    for (stage, blocks), requests in zip(recorded, real, strict=True):
        aligned = align([trace.sizes[block] for block in blocks], [request.nbytes for request in requests])
        if aligned is None:
            not_compared.append(stage)
            continue
        pairs += [(blocks[ours], requests[theirs]) for ours, theirs in aligned]
        matched_block = {theirs: blocks[ours] for ours, theirs in aligned}
        found = set(matched_block.values())
        extra += [
            (stage, trace.structure.operators[block], trace.sizes[block], "") for block in blocks if block not in found
        ]
        operator = ""
        for position, request in enumerate(requests):
            if position in matched_block:
                operator = trace.structure.operators[matched_block[position]]
            else:
                missed.append((stage, operator, request.nbytes, request.where))
    requests = [request for stage_requests in real for request in stage_requests]
    return {
        "requests": {"recorded": sum(len(blocks) for _, blocks in recorded), "real": len(requests)},
        "matched": len(pairs),
        "not_compared": not_compared,
        "missed": _largest_groups(missed),
        "too_many": _largest_groups(extra),
        "lifetimes": _lifetimes(trace, pairs, requests),
        "at_the_real_peak": _at_peak(requests, {id(request) for _, request in pairs}),
        "allocator": _allocator(events),
    }


def _largest_groups(found: list[tuple[str, str, int, str]]) -> dict[str, Any]:
    """Requests by stage, operator, size and lines; the groups with the most bytes first."""
    ordered = sorted(Counter(found).items(), key=lambda item: -item[0][2] * item[1])
    return {
        "count": len(found),
        "bytes": sum(nbytes for _, _, nbytes, _ in found),
        "largest": [
            {"stage": stage, "operator": operator, "bytes": nbytes, "times": times, "where": where}
            for (stage, operator, nbytes, where), times in ordered[:_SHOWN]
        ],
    }


def _lifetimes(trace: Trace, pairs: list[tuple[int, Request]], requests: list[Request]) -> dict[str, Any]:
    """Blocks released sooner or later than in the recording, counted in matched requests before the release."""
    rank_of_block = {block: rank for rank, (block, _) in enumerate(pairs)}
    rank_of_request = {id(request): rank for rank, (_, request) in enumerate(pairs)}
    recorded_ends: dict[int, int] = {}
    rank = -1
    for event in trace.structure.order:
        if event >= 0:
            rank = rank_of_block.get(event, rank)
        else:
            recorded_ends[~event] = rank
    real_ends: dict[int, int] = {}
    released = sorted((request.released, id(request)) for request in requests if request.released is not None)
    position, rank = 0, -1
    for request in requests:
        while position < len(released) and released[position][0] < request.position:
            real_ends[released[position][1]] = rank
            position += 1
        rank = rank_of_request.get(id(request), rank)
    real_ends.update((identity, rank) for _, identity in released[position:])
    sooner: Counter[str] = Counter()
    later: Counter[str] = Counter()
    same, never = 0, len(pairs)
    for block, request in pairs:
        difference = real_ends.get(id(request), never) - recorded_ends.get(block, never)
        if difference == 0:
            same += 1
        else:
            (later if difference > 0 else sooner)[trace.structure.operators[block]] += request.nbytes
    return {
        "same": same,
        "released_sooner_bytes": dict(sooner.most_common(_SHOWN)),
        "released_later_bytes": dict(later.most_common(_SHOWN)),
    }


def _at_peak(requests: list[Request], matched: set[int]) -> dict[str, Any]:
    """The most bytes in live requests of the real step, and how many of them the recording misses."""
    changes = []
    for request in requests:
        changes.append((request.position, request.nbytes, request))
        if request.released is not None:
            changes.append((request.released, -request.nbytes, request))
    total = most = 0
    live: dict[int, Request] = {}
    at_peak: list[Request] = []
    for _, change, request in sorted(changes, key=lambda change: change[0]):
        total += change
        if change > 0:
            live[id(request)] = request
        else:
            live.pop(id(request), None)
        if total > most:
            most, at_peak = total, list(live.values())
    missed = sum(request.nbytes for request in at_peak if id(request) not in matched)
    return {"bytes": most, "missed_bytes": missed}


def _allocator(events: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The real requests replayed on the simulated allocator, without a recording: does it take the same segments?"""
    expandable = any(event[0] == "segment_map" for event in events)
    if expandable or any(event[0] == "oom" for event in events):
        return {"compared": False}
    allocator = CachingAllocator()
    ours: list[tuple[str, int]] = []
    allocator.watch_segments(lambda action, address, nbytes, stream: ours.append((f"segment_{action}", nbytes)))
    live: dict[int, Block | None] = {}
    for action, nbytes, address, _ in events:
        if action == "alloc":
            live[address] = allocator.allocate(nbytes)
        elif action == "free_completed" and address in live:
            allocator.free(live.pop(address))
    theirs = [(action, nbytes) for action, nbytes, _, _ in events if action.startswith("segment_")]
    reserved = most = 0
    for action, nbytes in theirs:
        reserved += nbytes if action == "segment_alloc" else -nbytes
        most = max(most, reserved)
    same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return {
        "compared": True,
        "segments": {"simulated": len(ours), "real": len(theirs), "equal_from_the_first": same},
        "peak_reserved_bytes": {"simulated": allocator.max_reserved, "real": most},
    }
