"""Tests of snapshots: against PyTorch's own readers, against a real snapshot and against the replay."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz as viz

from batchfinder.simulator.alloc_conf import DEFAULT_SETTINGS, AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.memory_viz import pickled, take_snapshot
from batchfinder.simulator.replay import Timeline, replay
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.units import GIB, MIB

Snapshot = dict[str, Any]
START = 0x7F00_0000_0000


def step_of(order: list[int], sizes: list[int], marks: tuple[StageMark, ...] = ()) -> Trace:
    """A trace whose operators, modules, kinds and shapes bear the block's number."""
    count = range(len(sizes))
    structure = TraceStructure(
        order=tuple(order),
        marks=marks,
        operators=tuple(f"aten.op{i}.default" for i in count),
        modules=tuple(f"layer.{i}" if i % 3 else "" for i in count),
        kinds=tuple("activation" if i % 2 else "parameter" for i in count),
    )
    return Trace(2, 8, structure, tuple(sizes), shapes=tuple(f"float32[{i}]" if i % 3 else "" for i in count))


# 0 is a parameter, 1 the input, 2 an activation, 3 empty, 4 a gradient.
STEP = step_of(
    [0, 1, 2, 3, ~3, ~1, 4, ~2],
    [12 * MIB, 100_000, 30 * MIB + 5, 0, 12 * MIB],
    (
        StageMark(0, -1, "model"),
        StageMark(1, 0, "batch"),
        StageMark(2, 0, "loss", 1),
        StageMark(2, 0, "forward", 1),
        StageMark(6, 1, "backward"),
    ),
)


def both(step: Trace, memory: DeviceMemory | int | None, conf: AllocatorSettings) -> tuple[Snapshot, Timeline]:
    """A snapshot as it is read back from its file, and the replay of the same step."""
    snapshot = pickle.loads(pickled(take_snapshot(step, CachingAllocator(memory, conf))))
    return snapshot, replay(step.structure, step.sizes, CachingAllocator(memory, conf))


def test_pytorchs_list_of_events() -> None:
    """Its reader names segments and blocks, with offsets and sizes as asked for; an empty tensor is no event."""
    assert viz.trace(take_snapshot(STEP, CachingAllocator(56 * MIB))).splitlines()[:-1] == [
        "Device 0 ----------------",
        "13 entries",
        f"a = cudaMalloc({START}, 12.0MiB)",
        "b = a[0:12.0MiB]",
        f"c = cudaMalloc({START + 12 * MIB}, 2.0MiB)",
        "d = c[0:97.7KiB]",
        f"e = cudaMalloc({START + 14 * MIB}, 32.0MiB)",
        "f = e[0:30.0MiB]",
        "del d # 97.7KiB",
        "# free completed for d 97.7KiB",
        "cudaFree(c) # 2.0MiB",
        f"g = cudaMalloc({START + 46 * MIB}, 12.0MiB)",
        "h = g[0:12.0MiB]",
        "del f # 30.0MiB",
        "# free completed for f 30.0MiB",
    ]


def test_pytorchs_summary_of_segments() -> None:
    """Its totals are what the replay has at its end."""
    snapshot, timeline = both(STEP, 64 * MIB, AllocatorSettings())
    said = viz.segsum(snapshot).splitlines()
    assert "segments: 4" in said
    assert said[said.index("segments: 4") + 1 :][:3] == [
        f"total_reserved: {viz.Bytes(timeline.stages[-1].reserved_bytes)}",
        f"total_allocated: {viz.Bytes(timeline.stages[-1].allocated_bytes)}",
        "total_free: 34.0MiB (0.0% internal)",
    ]


def test_pytorchs_flame_graph() -> None:
    """What is held at the end comes by stage, kind, tensor, module and operator, and so does every event."""
    lines = viz.memory(take_snapshot(STEP, CachingAllocator()), lambda text: text).splitlines()
    assert [line.removeprefix("stream_0;active_allocated;") for line in lines if ";active" in line] == [
        f"before the first step:0:model;parameter:0:shape not known;no module:0:aten.op0.default {12 * MIB}",
        f"step 1:0:backward;parameter:0:float32[4];layer.4:0:aten.op4.default {12 * MIB}",
    ]
    frames = [entry["frames"] for entry in take_snapshot(STEP, CachingAllocator())["device_traces"][0]]
    assert frames[5] == [
        {"filename": "layer.2", "line": 0, "name": "aten.op2.default"},
        {"filename": "parameter", "line": 0, "name": "float32[2]"},
        {"filename": "step 0, micro-batch 1", "line": 0, "name": "forward"},
    ]
    assert frames[4] == frames[5]  # the segment was taken for it
    assert frames[-1] == frames[5]  # and this is its release


@pytest.mark.parametrize("draw", [viz.trace_plot, viz.segment_plot])
def test_pytorchs_pages(draw: Any) -> None:
    """Its two pages hold the whole snapshot."""
    snapshot = take_snapshot(STEP, CachingAllocator())
    (files,) = re.findall(r"const local_files = (.*)", draw(snapshot))
    (file,) = json.loads(files)
    assert pickle.loads(base64.b64decode(file["base64"])) == snapshot


def test_out_of_memory_is_the_last_event() -> None:
    """A failure has the request, rounded up, and what the card has free; the state is that of the moment."""
    memory = DeviceMemory(64 * MIB, 40 * MIB)
    snapshot, timeline = both(STEP, memory, AllocatorSettings())
    assert timeline.oom is not None
    last = snapshot["device_traces"][0][-1]
    assert (last["action"], last["size"], last["device_free"]) == ("oom", 30 * MIB + 512, 26 * MIB)
    assert "addr" not in last
    assert last["frames"][0]["name"] == "aten.op2.default"
    assert viz.trace(snapshot).splitlines()[-2] == "raise OutOfMemoryError # 30.0MiB requested, 26.0MiB free in CUDA"
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == timeline.oom.reserved_bytes == 14 * MIB
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == timeline.oom.allocated_bytes


def test_expandable_segments() -> None:
    """They are mapped and unmapped page by page, and say what they are; settings stand beside them."""
    step = step_of([0, 1, ~1, 2], [3 * MIB, 50 * MIB, 100])
    snapshot, _ = both(step, DeviceMemory(GIB, 61 * MIB), AllocatorSettings.parse("expandable_segments:True"))
    assert [(entry["action"], entry["addr"] - START, entry["size"]) for entry in snapshot["device_traces"][0]] == [
        ("segment_map", 0, 20 * MIB),
        ("alloc", 0, 3 * MIB),
        ("segment_map", 20 * MIB, 40 * MIB),
        ("alloc", 3 * MIB, 50 * MIB),
        ("free_requested", 3 * MIB, 50 * MIB),
        ("free_completed", 3 * MIB, 50 * MIB),
        ("segment_unmap", 20 * MIB, 40 * MIB),
        ("segment_map", 1160 * MIB, 2 * MIB),
        ("alloc", 1160 * MIB, 100),
    ]
    large, small = snapshot["segments"]
    assert (large["segment_type"], small["segment_type"]) == ("large", "small")
    assert large["is_expandable"]
    assert large["frames"][0]["name"] == "aten.op0.default"
    assert snapshot["allocator_settings"]["expandable_segments"] is True


def test_settings_by_pytorchs_names() -> None:
    """No limit is -1, as in PyTorch; divisions are named by the least MiB that they are for."""
    said = take_snapshot(STEP, CachingAllocator())["allocator_settings"]
    assert (said["expandable_segments"], said["max_split_size"]) == (False, -1)
    assert list(said["roundup_power2_divisions"].items())[-1] == ("32768", 0)
    conf = AllocatorSettings.parse("max_split_size_mb:64,roundup_power2_divisions:[1:2,>:4]")
    said = take_snapshot(STEP, CachingAllocator(None, conf))["allocator_settings"]
    assert said["max_split_size"] == 64 * MIB
    assert said["roundup_power2_divisions"]["1"] == 2
    assert said["roundup_power2_divisions"]["2"] == 4


# The fields of a snapshot that PyTorch wrote on a CUDA card in 2026, and the events of the AdamW step in it: what was
# asked for, and the segment and offset that PyTorch gave. `+` takes a segment, `-` releases the block at this place.
# https://github.com/a0kuma/pytorchMemoryViz/blob/main/tests/gpu_memory_snapshot-adam.pickle
ENTRY = {"action", "addr", "size", "stream", "time_us", "frames"}
SEGMENT = {
    *("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type"),
    *("segment_pool_id", "is_expandable", "frames", "blocks"),
}
BLOCK = {"address", "size", "requested_size", "state", "frames"}
REAL = """
    +41943040 40000000@0:0 +2097152 4000@1:0 640000@1:4096 64000@1:644096 1048576@1:708096 +20971520 8519680@2:0
    -1048576@1:708096 4@1:708096 4@1:708608 +41943040 40000000@3:0 64000@1:709120 8519680@2:8519680 -64000@1:709120
    4000@1:709120 -4@1:708608 +41943040 40000000@4:0 +41943040 40000000@5:0 4000@1:713216 4000@1:717312
    +41943040 40000000@6:0 4000@1:721408 -4000@1:721408 -40000000@6:0
"""
REAL_SEGMENTS = [
    *[(41943040, 40000000, 40000000, "large", 2), (2097152, 720896, 720004, "small", 9)],
    *[(20971520, 17039360, 17039360, "large", 3), *[(41943040, 40000000, 40000000, "large", 2)] * 3],
    (41943040, 0, 0, "large", 1),
]


def test_a_real_snapshot() -> None:
    """The requests of a real snapshot give its events, its segments and its fields."""
    order: list[int] = []
    sizes: list[int] = []
    number: dict[str, int] = {}
    for word in REAL.split():
        if word.startswith("-"):
            order.append(~number[word[1:]])
        elif not word.startswith("+"):
            number[word] = len(sizes)
            order.append(len(sizes))
            sizes.append(int(word.split("@")[0]))
    snapshot = take_snapshot(step_of(order, sizes), CachingAllocator(15 * GIB))
    words: list[str] = []
    starts: list[int] = []
    for entry in snapshot["device_traces"][0]:
        assert entry.keys() == ENTRY
        if entry["action"] == "segment_alloc":
            starts.append(entry["addr"])
            words.append(f"+{entry['size']}")
            continue
        segment = max((start, i) for i, start in enumerate(starts) if start <= entry["addr"])[1]
        place = f"{entry['size']}@{segment}:{entry['addr'] - starts[segment]}"
        if entry["action"] == "free_completed":
            assert words[-1] == f"free_requested{place}"
            words[-1] = f"-{place}"
        else:
            words.append({"alloc": "", "free_requested": "free_requested"}[entry["action"]] + place)
    assert words == REAL.split()
    assert [
        (one["total_size"], one["allocated_size"], one["requested_size"], one["segment_type"], len(one["blocks"]))
        for one in snapshot["segments"]
    ] == [segment for _, segment in sorted(zip(starts, REAL_SEGMENTS, strict=True))]
    for segment in snapshot["segments"]:
        assert segment.keys() == SEGMENT
        assert (segment["device"], segment["segment_pool_id"], segment["is_expandable"]) == (0, (0, 0), False)
        assert all(block.keys() == BLOCK for block in segment["blocks"])


# What `unpickle` in torch/utils/viz/MemoryViz.js can read, by the names of pickletools; from a copy of 2026.
PAGE_READS = """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME
    LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS SHORT_BINUNICODE STOP
    TUPLE TUPLE1 TUPLE2 TUPLE3
"""


def test_the_page_can_read_the_file() -> None:
    """A long file, with long names and sizes over 2 GiB, has only what the page's own unpickler knows."""
    step = step_of([*range(1200), *(~i for i in range(600))], [3 * GIB + 7 * i for i in range(1200)])
    step = Trace(2, 8, step.structure, step.sizes, shapes=("float32[" + "1, " * 200 + "1]",) * 1200)
    codes = list(pickletools.genops(pickled(take_snapshot(step, CachingAllocator()))))
    assert {code.name for code, _, _ in codes} <= set(PAGE_READS.split())
    assert codes[0][1] == 4  # protocols 2 to 4
    numbers = [argument for _, argument, _ in codes if isinstance(argument, int)]
    assert max(numbers) < 1 << 53  # JavaScript's numbers are exact to there


CONFS = ["", "expandable_segments:True", "max_split_size_mb:21", "roundup_power2_divisions:4"]


@st.composite
def steps(draw: st.DrawFn) -> Trace:
    """A random step in which every release follows its allocation."""
    order: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    for release in draw(st.lists(st.integers(-20, 20), max_size=60)):
        if release >= 0 and live:
            order.append(~live.pop(release % len(live)))
        else:
            live.append(len(sizes))
            order.append(len(sizes))
            sizes.append(draw(st.one_of(st.integers(0, 3 * MIB), st.integers(0, 40 * MIB))))
    return step_of(order, sizes, (StageMark(0, 0, "forward"),))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps(), st.one_of(st.none(), st.integers(0, 200)), st.sampled_from(CONFS))
def test_events_lead_to_the_segments(step: Trace, mebibytes: int | None, conf: str) -> None:
    """Every event makes sense after those before it, and together they give the end, with the replay's figures."""
    memory = DeviceMemory(GIB, GIB if mebibytes is None else mebibytes * MIB)
    snapshot, timeline = both(step, memory, AllocatorSettings.parse(conf))
    (entries,) = snapshot["device_traces"]
    assert [entry["time_us"] for entry in entries] == list(range(len(entries)))
    pages: set[int] = set()  # of 2 MiB, by number
    held: dict[int, int] = {}
    reserved = [0]
    asked = [0]
    for entry in entries:
        action, size = entry["action"], entry["size"]
        own = set(range(entry.get("addr", 0) // (2 * MIB), (entry.get("addr", 0) + size - 1) // (2 * MIB) + 1))
        if action in ("segment_alloc", "segment_map"):
            assert not own & pages
            pages |= own
        elif action in ("segment_free", "segment_unmap"):
            assert own <= pages
            assert not any(entry["addr"] <= block < entry["addr"] + size for block in held)
            pages -= own
        elif action == "alloc":
            assert own <= pages
            assert all(block + held[block] <= entry["addr"] or entry["addr"] + size <= block for block in held)
            held[entry["addr"]] = size
        elif action == "free_completed":
            assert held.pop(entry["addr"]) == size
        else:
            assert action in ("free_requested", "oom")
        reserved.append(len(pages) * 2 * MIB)
        asked.append(sum(held.values()))
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    alive = {block["address"]: block for block in blocks if block["state"] == "active_allocated"}
    assert held == {address: block["requested_size"] for address, block in alive.items()}
    assert all(len(block["frames"]) == (3 if block["address"] in alive else 0) for block in blocks)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == reserved[-1]
    assert max(reserved) == timeline.max_reserved_bytes
    last = timeline.oom or (timeline.stages[-1] if timeline.stages else None)
    assert last is None or last.allocated_bytes == sum(segment["allocated_size"] for segment in snapshot["segments"])
    assert last is None or last.reserved_bytes == reserved[-1]
    assert max(asked) <= timeline.max_allocated_bytes
    assert ("oom" in {entry["action"] for entry in entries}) == (timeline.oom is not None)
    viz.segsum(snapshot)  # checks that blocks fill their segments


def test_the_most_is_the_replays() -> None:
    """With sizes that are not rounded, the most that the blocks sum to is the replay's peak."""
    step = step_of([0, 1, 2, ~1, 3, ~0, ~3, 4], [size * MIB for size in (12, 30, 14, 30, 16)])
    snapshot, timeline = both(step, None, AllocatorSettings())
    signs = {"alloc": 1, "free_completed": -1}
    changes = [signs.get(entry["action"], 0) * entry["size"] for entry in snapshot["device_traces"][0]]
    assert max(accumulate(changes)) == timeline.max_allocated_bytes == 56 * MIB


def test_what_waits_for_another_stream() -> None:
    """It is released when it was, and free when the host has waited for the other stream, or the card is full."""
    step = step_of([0, 1, ~0, ~1, 2, 3], [30 * MIB] * 4)
    waits = replace(step, structure=replace(step.structure, streams=(3, 3, 0, 0), free_completed=((4, 0), (6, 1))))
    snapshot, timeline = both(waits, None, DEFAULT_SETTINGS)
    frees = [
        (entry["action"], entry["addr"] - START, entry["stream"])
        for entry in snapshot["device_traces"][0]
        if entry["action"].startswith("free")
    ]
    first, second, size = 0, 30 * MIB, 30 * MIB
    assert frees == [("free_requested", first, 3), ("free_requested", second, 3), ("free_completed", first, 3)]
    taken = snapshot["segments"]
    assert [(segment["allocated_size"], segment["active_size"]) for segment in taken] == [
        *[(0, 0), (0, size)],
        *[(size, size)] * 2,
    ]
    states = [block["state"] for segment in taken for block in segment["blocks"]]
    assert states == ["inactive", "active_pending_free", "active_allocated", "active_allocated"]
    assert all(block["frames"] for block in taken[1]["blocks"])
    assert timeline.max_reserved_bytes == 4 * size
    full, _ = both(waits, 64 * MIB, DEFAULT_SETTINGS)
    assert [(entry["action"], entry["stream"]) for entry in full["device_traces"][0]][-9:] == [
        ("free_requested", 3),
        ("free_completed", 3),
        ("free_completed", 3),
        ("segment_free", 3),
        ("segment_free", 3),
        ("segment_alloc", 0),
        ("alloc", 0),
        ("segment_alloc", 0),
        ("alloc", 0),
    ]
    step = step_of([0, ~0, 1], [30 * MIB] * 2)
    again, _ = both(replace(step, structure=replace(step.structure, free_completed=((2, 0),))), None, DEFAULT_SETTINGS)
    actions = [entry["action"] for entry in again["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed", "alloc"]


def test_streams_are_told_apart() -> None:
    """Each event and each segment bears its block's stream."""
    step = step_of([0, 1, ~1], [12 * MIB, 12 * MIB])
    streams = replace(step, structure=replace(step.structure, streams=(0, 3)))
    snapshot, _ = both(streams, None, DEFAULT_SETTINGS)
    assert [entry["stream"] for entry in snapshot["device_traces"][0]] == [0, 0, 3, 3, 3, 3]
    assert [segment["stream"] for segment in snapshot["segments"]] == [0, 3]
    step = step_of([0, ~0, 1], [60 * MIB] * 2)
    streams = replace(step, structure=replace(step.structure, streams=(3, 0)))
    full, _ = both(streams, 64 * MIB, AllocatorSettings(expandable_segments=True))
    pages = [(entry["action"], entry["stream"]) for entry in full["device_traces"][0]]
    assert list(dict.fromkeys(pages)) == [
        ("segment_map", 3),
        ("alloc", 3),
        ("free_requested", 3),
        ("free_completed", 3),
        ("segment_unmap", 3),
        ("segment_map", 0),
        ("alloc", 0),
    ]
