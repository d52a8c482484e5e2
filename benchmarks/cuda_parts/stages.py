"""A trace replayed stage by stage: what each stage reaches at most, and what it leaves."""

from __future__ import annotations

from typing import Any

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, SimulatedOutOfMemory
from batchfinder.simulator.trace import Trace

COUNTERS = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes")

Stage = dict[str, Any]


def stage(step: int, name: str, micro_batch: int, counters: tuple[int, int, int, int]) -> Stage:
    """One stage's figures as JSON values.

    Args:
        step: which optimizer step; -1 while the model is moved.
        name: `model`, `forward`, ...
        micro_batch: which of the step.
        counters: in the order of `COUNTERS`; peaks are the stage's own.
    """
    return {"step": step, "stage": name, "micro_batch": micro_batch, **dict(zip(COUNTERS, counters, strict=True))}


def replay_stages(trace: Trace, allocator: CachingAllocator) -> tuple[list[Stage], str]:
    """Replay a trace; peaks start anew with each stage, as after `torch.cuda.reset_peak_memory_stats`.

    Args:
        trace: the step.
        allocator: a new one.

    Returns:
        The stages that ended, and the message of the failure if the card was too small.
    """
    structure = trace.structure
    live: dict[int, Block | None] = {}
    found: list[Stage] = []
    ends = [*(mark.position for mark in structure.marks[1:]), len(structure.order)]
    for mark, end in zip(structure.marks, ends, strict=True):
        allocator.reset_peak()
        for event in structure.order[mark.position : end]:
            if event < 0:
                allocator.free(live.pop(~event))
                continue
            try:
                live[event] = allocator.allocate(trace.sizes[event])
            except SimulatedOutOfMemory as error:
                return found, str(error)
        counters = (allocator.allocated, allocator.max_allocated, allocator.reserved, allocator.max_reserved)
        found.append(stage(mark.step, mark.stage, mark.micro_batch, counters))
    return found, ""


def peaks(found: list[Stage]) -> dict[str, int]:
    """The peaks of all stages together.

    Args:
        found: at least one stage.
    """
    return {name: max(one[name] for one in found) for name in ("peak_allocated_bytes", "peak_reserved_bytes")}


def beside(predicted: list[Stage], measured: list[Stage]) -> list[dict[str, Any]]:
    """Both figures of each stage that both have.

    Args:
        predicted: by the simulator.
        measured: on the card.
    """
    keys = ("step", "stage", "micro_batch")
    by_key = {tuple(one[key] for key in keys): one for one in measured}
    rows = []
    for one in predicted:
        other = by_key.get(tuple(one[key] for key in keys))
        if other is not None:
            figures = {name: [one[name], other[name]] for name in COUNTERS}
            rows.append({**{key: one[key] for key in keys}, "predicted_and_measured": figures})
    return rows
