"""A replay as PyTorch's memory snapshot, which https://docs.pytorch.org/memory_viz and torch/cuda/_memory_viz.py read.

The fields are those of `torch.cuda.memory._snapshot`. What is entered when, and with which size, is what
https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp hands to `record_trace`: blocks count
with the bytes asked for, segments with their own, a failure with the request rounded up.

A recording has no call stacks. In their place each block has three frames, the innermost first as in PyTorch's:
operator and module, kind and tensor, stage and step. There is no clock either: an event takes a microsecond.
"""

from __future__ import annotations

import pickle
from typing import Any

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, SimulatedOutOfMemory, block_size
from batchfinder.simulator.trace import Trace

Entry = dict[str, Any]

# Where the driver likes to put segments. Readers may take an address of 0 for none at all.
_FIRST_ADDRESS = 0x7F00_0000_0000
# The page's own unpickler knows protocols 2 to 4: torch/utils/viz/MemoryViz.js.
_PROTOCOL = 4


def take_snapshot(trace: Trace, allocator: CachingAllocator) -> Entry:
    """Replay a whole trace and write down what the allocator does.

    Args:
        allocator: a new one, made for the card and the settings in question. It is left as the trace leaves it.

    Returns:
        `segments` as they are at the end, `device_traces` with every event of the one device, and
        `allocator_settings`. A trace that the card has no room for ends with an `oom` event.
    """
    entries: list[Entry] = []
    streams = trace.structure.streams
    frames_at: dict[int, list[Entry]] = {}  # of each block in use, by address as the simulator has it
    segment_frames_at: dict[int, list[Entry]] = {}  # of the request that each segment was taken for, likewise
    requesting: list[Entry] = []  # the frames of the request that is being met

    def enter(action: str, size: int, frames: list[Entry], stream: int, **where: int) -> None:
        time = len(entries)
        entries.append({"action": action, **where, "size": size, "stream": stream, "time_us": time, "frames": frames})

    def stream_of(number: int) -> int:
        return streams[number] if streams else 0

    pending: dict[int, tuple[Block, int, int, list[Entry]]] = {}  # by number, with what is entered when it is free

    def enter_completed() -> None:
        for number, (block, address, size, frames) in list(pending.items()):
            if not allocator.is_pending(block):
                del pending[number]
                enter("free_completed", size, frames, stream_of(number), addr=_FIRST_ADDRESS + address)

    def enter_segment(action: str, address: int, nbytes: int, stream: int) -> None:
        enter_completed()  # a cache is emptied when other streams have been waited for
        if action in ("alloc", "map"):
            segment_frames_at[address] = requesting
        enter(f"segment_{action}", nbytes, requesting, stream, addr=_FIRST_ADDRESS + address)

    allocator.watch_segments(enter_segment)
    frames_of = _frames(trace)
    live: dict[int, Block | None] = {}
    waits = {number: position for position, number in trace.structure.free_completed}
    completed: dict[int, list[int]] = {}
    for number, position in waits.items():
        completed.setdefault(position, []).append(number)
    try:
        for position, event in enumerate(trace.structure.order):
            for number in completed.get(position, ()):
                allocator.complete_free(live[number])
            enter_completed()
            stream = stream_of(event if event >= 0 else ~event)
            if event < 0:
                block = live[~event]
                if block is None:  # no bytes, no event
                    continue
                size, frames = block.requested, frames_at.pop(block.address)
                enter("free_requested", size, frames, stream, addr=_FIRST_ADDRESS + block.address)
                if ~event in waits:
                    pending[~event] = block, block.address, size, frames
                    allocator.request_free(block)
                else:
                    enter("free_completed", size, frames, stream, addr=_FIRST_ADDRESS + block.address)
                    allocator.free(block)
                continue
            requesting = frames_of[event]
            block = live[event] = allocator.allocate(trace.sizes[event], stream)
            if block is not None:
                frames_at[block.address] = requesting
                enter("alloc", trace.sizes[event], requesting, stream, addr=_FIRST_ADDRESS + block.address)
    except SimulatedOutOfMemory as error:
        size = block_size(error.requested_bytes, allocator.settings)
        enter("oom", size, requesting, stream, device_free=error.free_bytes)
    waiting = {address: frames for _, address, _, frames in pending.values()}
    segments = []
    for segment in allocator.segments():
        in_use = sum(block.size_bytes for block in segment.blocks if not block.free)
        awaited = sum(block.size_bytes for block in segment.blocks if block.pending)
        blocks = [
            {
                "address": _FIRST_ADDRESS + each.address,
                "size": each.size_bytes,
                "requested_size": each.requested_bytes,
                "state": each.state,
                "frames": (waiting if each.pending else frames_at).get(each.address, []),
            }
            for each in segment.blocks
        ]
        segments.append(
            {
                "device": 0,
                "address": _FIRST_ADDRESS + segment.address,
                "total_size": segment.size_bytes,
                "allocated_size": in_use - awaited,
                "active_size": in_use,
                "requested_size": sum(block.requested_bytes for block in segment.blocks),
                "stream": segment.stream,
                "segment_type": "small" if segment.small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": segment.expandable,
                "frames": segment_frames_at.get(segment.address, []),
                "blocks": blocks,
            }
        )
    settings = allocator.settings
    divisions = settings.roundup_power2_divisions or (0,) * 16
    max_split = settings.max_split_size_bytes
    return {
        "segments": segments,
        "device_traces": [entries],
        "allocator_settings": {  # by PyTorch's names; divisions go by the interval's start in MiB
            "expandable_segments": settings.expandable_segments,
            "max_split_size": -1 if max_split is None else max_split,
            "roundup_power2_divisions": {str(1 << power): steps for power, steps in enumerate(divisions)},
        },
    }


def pickled(snapshot: Entry) -> bytes:
    """A snapshot as `torch.cuda.memory._dump_snapshot` would have it in a file."""
    return pickle.dumps(snapshot, protocol=_PROTOCOL)


def _frames(trace: Trace) -> list[list[Entry]]:
    """What stands for each block's call stack. Equal frames are one object, so a pickle has them once."""
    structure = trace.structure
    shapes = trace.shapes or ("",) * len(trace.sizes)
    known: dict[tuple[str, str], Entry] = {}
    marks = iter([*structure.marks, None])
    mark, coming = None, next(marks)
    frames: list[list[Entry]] = []
    for position, block in enumerate(structure.order):
        while coming is not None and coming.position <= position:
            mark, coming = coming, next(marks)
        if block < 0:
            continue
        names = [
            (structure.modules[block] or "no module", structure.operators[block]),
            (structure.kinds[block], shapes[block] or "shape not known"),
        ]
        if mark is not None:
            step = f"step {mark.step}" + (f", micro-batch {mark.micro_batch}" if mark.micro_batch else "")
            names.append((step if mark.step >= 0 else "before the first step", mark.stage))
        # Blocks are numbered in the order in which they are allocated.
        frames.append([known.setdefault(key, {"filename": key[0], "line": 0, "name": key[1]}) for key in names])
    return frames
