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

from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, SimulatedOutOfMemory, block_size
from batchfinder.simulator.segments import Segment
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure

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
    history = _History(trace, allocator)
    history.replay()
    segments = [_segment(segment, history.frames_at, history.segment_frames_at) for segment in allocator.segments()]
    return {
        "segments": segments,
        "device_traces": [history.entries],
        "allocator_settings": _settings(allocator.settings),
    }


def pickled(snapshot: Entry) -> bytes:
    """A snapshot as `torch.cuda.memory._dump_snapshot` would have it in a file."""
    return pickle.dumps(snapshot, protocol=_PROTOCOL)


class _History:
    """What happens in a replay.

    Attributes:
        entries: the events, in order.
        frames_at: of each block in use, by address as the simulator has it.
        segment_frames_at: of the request that each segment was taken for, by address.
    """

    def __init__(self, trace: Trace, allocator: CachingAllocator) -> None:
        self.entries: list[Entry] = []
        self.frames_at: dict[int, list[Entry]] = {}
        self.segment_frames_at: dict[int, list[Entry]] = {}
        self._trace = trace
        self._allocator = allocator
        self._frames = _Frames(trace)
        self._requesting: list[Entry] = []  # the frames of the request that is being met
        allocator.watch_segments(self._segment_event)

    def replay(self) -> None:
        """Run the trace through the allocator, to its end or to where the card is full."""
        live: dict[int, Block | None] = {}
        for position, event in enumerate(self._trace.structure.order):
            if event < 0:
                self._free(live.pop(~event))
                continue
            self._requesting = self._frames.of(event, position)
            try:
                live[event] = self._allocate(self._trace.sizes[event])
            except SimulatedOutOfMemory as error:
                size = block_size(error.requested_bytes, self._allocator.settings)
                self._enter("oom", size, self._requesting, device_free=error.free_bytes)
                return

    def _allocate(self, nbytes: int) -> Block | None:
        block = self._allocator.allocate(nbytes)
        if block is not None:
            self.frames_at[block.address] = self._requesting
            self._enter("alloc", nbytes, self._requesting, addr=_shown(block.address))
        return block

    def _free(self, block: Block | None) -> None:
        if block is None:  # no bytes, no event
            return
        frames = self.frames_at.pop(block.address)
        for action in ("free_requested", "free_completed"):
            self._enter(action, block.requested, frames, addr=_shown(block.address))
        self._allocator.free(block)

    def _segment_event(self, action: str, address: int, nbytes: int) -> None:
        self.segment_frames_at[address] = self._requesting
        self._enter(f"segment_{action}", nbytes, self._requesting, addr=_shown(address))

    def _enter(self, action: str, size: int, frames: list[Entry], **where: int) -> None:
        time = len(self.entries)
        self.entries.append({"action": action, **where, "size": size, "stream": 0, "time_us": time, "frames": frames})


class _Frames:
    """What stands for the call stacks of a trace's blocks. Equal frames are one object, so a pickle has them once."""

    def __init__(self, trace: Trace) -> None:
        self._structure: TraceStructure = trace.structure
        self._shapes = trace.shapes or ("",) * len(trace.sizes)
        self._known: dict[tuple[str, str], Entry] = {}
        self._marks_passed = 0

    def of(self, block: int, position: int) -> list[Entry]:
        """The frames of a block that is allocated at a position. Positions must rise from call to call."""
        structure = self._structure
        marks = structure.marks
        while self._marks_passed < len(marks) and marks[self._marks_passed].position <= position:
            self._marks_passed += 1
        frames = [
            self._frame(structure.modules[block] or "no module", structure.operators[block]),
            self._frame(structure.kinds[block], self._shapes[block] or "shape not known"),
        ]
        if self._marks_passed:
            mark = marks[self._marks_passed - 1]
            frames.append(self._frame(_step(mark), mark.stage))
        return frames

    def _frame(self, filename: str, name: str) -> Entry:
        key = (filename, name)
        if key not in self._known:
            self._known[key] = {"filename": filename, "line": 0, "name": name}
        return self._known[key]


def _step(mark: StageMark) -> str:
    if mark.step < 0:
        return "before the first step"
    return f"step {mark.step}" + (f", micro-batch {mark.micro_batch}" if mark.micro_batch else "")


def _shown(address: int) -> int:
    return _FIRST_ADDRESS + address


def _segment(segment: Segment, frames_at: dict[int, list[Entry]], segment_frames_at: dict[int, list[Entry]]) -> Entry:
    blocks = [
        {
            "address": _shown(block.address),
            "size": block.size_bytes,
            "requested_size": block.requested_bytes,
            "state": "inactive" if block.free else "active_allocated",
            "frames": frames_at.get(block.address, []),
        }
        for block in segment.blocks
    ]
    in_use = sum(block.size_bytes for block in segment.blocks if not block.free)
    return {
        "device": 0,
        "address": _shown(segment.address),
        "total_size": segment.size_bytes,
        "allocated_size": in_use,
        "active_size": in_use,  # nothing waits for another stream
        "requested_size": sum(block.requested_bytes for block in segment.blocks),
        "stream": 0,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.expandable,
        "frames": segment_frames_at.get(segment.address, []),
        "blocks": blocks,
    }


def _settings(settings: AllocatorSettings) -> Entry:
    """Those that are simulated, by PyTorch's names: -1 is no limit, and divisions go by the interval's start in MiB."""
    divisions = settings.roundup_power2_divisions or (0,) * 16
    max_split = settings.max_split_size_bytes
    return {
        "expandable_segments": settings.expandable_segments,
        "max_split_size": -1 if max_split is None else max_split,
        "roundup_power2_divisions": {str(1 << power): steps for power, steps in enumerate(divisions)},
    }
