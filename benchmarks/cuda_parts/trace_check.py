"""The recorded step beside the history of a real allocator: what the recording misses. Nothing imports torch.

Both are lists of requests in order. Each stage of the real step begins with a marker, an allocation of a size that
nothing else has, so that stage is compared with stage. Requests of one size in one order are taken to be the same;
what is left over on the real side is what the recording misses (workspaces, kernels' temporaries), told by the operator
of the request before it, and what is left over on the other side is what it has too much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block
from batchfinder.simulator.trace import Trace
from benchmarks.cuda_parts.alignment import align
from benchmarks.cuda_parts.history import Request, requests_by_stage

SHOWN = 12


def compare(trace: Trace, events: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """What the two have in common, and what not, as JSON values.

    Args:
        trace: recorded on the pretend GPU.
        events: the history, as `read_history` makes it.

    Raises:
        ValueError: the history has not the trace's stages.
    """
    real = requests_by_stage(events)
    recorded = _recorded_by_stage(trace)
    if len(real) != len(recorded):
        raise ValueError(f"the history has {len(real)} stages, the recording {len(recorded)}")
    missed: list[tuple[str, str, Request]] = []
    extra: list[tuple[str, int]] = []
    pairs: list[tuple[int, Request]] = []
    given_up = []
    for (name, blocks), requests in zip(recorded, real, strict=True):
        sizes = [trace.sizes[block] for block in blocks]
        aligned = align(sizes, [request.nbytes for request in requests])
        if aligned is None:
            given_up.append(name)
            continue
        pairs += [(blocks[ours], requests[theirs]) for ours, theirs in aligned]
        before = {theirs: ours for ours, theirs in aligned}
        found = set(before.values())
        extra += [(name, block) for position, block in enumerate(blocks) if position not in found]
        last = ""
        for position, request in enumerate(requests):
            if position in before:
                last = trace.structure.operators[blocks[before[position]]]
            else:
                missed.append((name, last, request))
    everything = [request for stage in real for request in stage]
    return {
        "requests": {"recorded": sum(len(blocks) for _, blocks in recorded), "real": len(everything)},
        "matched": len(pairs),
        "not_compared": given_up,
        "missed": _grouped([(stage, after, request.nbytes, request.where) for stage, after, request in missed]),
        "too_many": _grouped(
            [(stage, trace.structure.operators[block], trace.sizes[block], "") for stage, block in extra]
        ),
        "lifetimes": _lifetimes(trace, pairs, everything),
        "at_the_real_peak": _at_peak(everything, {id(request) for _, request in pairs}),
        "allocator": _allocator(events),
    }


def _recorded_by_stage(trace: Trace) -> list[tuple[str, list[int]]]:
    """The blocks that each stage allocates; no bytes are no request (`NativeCachingAllocator::allocate`)."""
    marks, order = trace.structure.marks, trace.structure.order
    ends = [*(mark.position for mark in marks[1:]), len(order)]
    return [
        (
            f"{mark.stage} of step {mark.step}" if mark.step >= 0 else mark.stage,
            [event for event in order[mark.position : end] if event >= 0 and trace.sizes[event]],
        )
        for mark, end in zip(marks, ends, strict=True)
    ]


def _grouped(found: list[tuple[str, str, int, str]]) -> dict[str, Any]:
    """By stage, operator and size, the most bytes first."""
    counts = Counter(found)
    ordered = sorted(counts.items(), key=lambda item: -item[0][2] * item[1])
    return {
        "count": len(found),
        "bytes": sum(nbytes for _, _, nbytes, _ in found),
        "largest": [
            {"stage": stage, "operator": operator, "bytes": nbytes, "times": times, "where": where}
            for (stage, operator, nbytes, where), times in ordered[:SHOWN]
        ],
    }


def _lifetimes(trace: Trace, pairs: list[tuple[int, Request]], everything: list[Request]) -> dict[str, Any]:
    """Blocks that the real step releases sooner or later than the recorded one, counted in matched requests."""
    rank_of_block = {block: rank for rank, (block, _) in enumerate(pairs)}
    rank_of_request = {id(request): rank for rank, (_, request) in enumerate(pairs)}
    ends_recorded: dict[int, int] = {}
    rank = -1
    for event in trace.structure.order:
        if event >= 0:
            rank = rank_of_block.get(event, rank)
        else:
            ends_recorded[~event] = rank
    ends_real: dict[int, int] = {}
    released = sorted((request.released, id(request)) for request in everything if request.released is not None)
    position, rank = 0, -1
    for request in everything:
        while position < len(released) and released[position][0] < request.position:
            ends_real[released[position][1]] = rank
            position += 1
        rank = rank_of_request.get(id(request), rank)
    ends_real.update((identity, rank) for _, identity in released[position:])
    sooner: Counter[str] = Counter()
    later: Counter[str] = Counter()
    same, never = 0, len(pairs)
    for block, request in pairs:
        ours, theirs = ends_recorded.get(block), ends_real.get(id(request))
        difference = (never if theirs is None else theirs) - (never if ours is None else ours)
        if difference == 0:
            same += 1
        else:
            operator = trace.structure.operators[block]
            (later if difference > 0 else sooner)[operator] += request.nbytes
    return {
        "same": same,
        "released_sooner_bytes": dict(sooner.most_common(SHOWN)),
        "released_later_bytes": dict(later.most_common(SHOWN)),
    }


def _at_peak(everything: list[Request], matched: set[int]) -> dict[str, Any]:
    """What was alive when the real step had the most in live requests: the recording's, and what it misses."""
    changes = []
    for request in everything:
        changes.append((request.position, request.nbytes, request))
        if request.released is not None:
            changes.append((request.released, -request.nbytes, request))
    total = most = 0
    alive: dict[int, Request] = {}
    at_peak: list[Request] = []
    for _, change, request in sorted(changes, key=lambda change: change[0]):
        total += change
        if change > 0:
            alive[id(request)] = request
        else:
            alive.pop(id(request), None)
        if total > most:
            most, at_peak = total, list(alive.values())
    return {
        "bytes": most,
        "missed_bytes": sum(request.nbytes for request in at_peak if id(request) not in matched),
    }


def _allocator(events: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The real requests, without any recording, through the simulated allocator: does it take the same segments?"""
    expandable = any(event[0] == "segment_map" for event in events)
    if expandable or any(event[0] == "oom" for event in events):
        return {"compared": False}
    allocator = CachingAllocator()
    ours: list[tuple[str, int]] = []
    allocator.watch_segments(lambda action, address, nbytes: ours.append((f"segment_{action}", nbytes)))
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
