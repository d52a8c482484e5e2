"""Traces as JSON, and blocks added to a trace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.replay import alive_at, replay
from batchfinder.simulator.trace import AddedBlock, StageMark, Trace, TraceStructure, add_blocks

TRACE = Trace(
    batch_size=3,
    seq_len=None,
    structure=TraceStructure(
        order=(0, 1, ~0, 2),
        marks=(StageMark(0, -1, "model"), StageMark(1, 0, "forward", 1)),
        operators=("aten.a", "aten.b", "aten.a"),
        modules=("", "encoder.0", "encoder.0"),
        kinds=("parameter", "activation", "temporary"),
    ),
    sizes=(12, 0, 7),
    unmodelled=("a thing",),
    shapes=("float32[3]", "", "float32[3]"),
)


def test_survives_json() -> None:
    """What is written as text is read back equal, tuples and all."""
    again = Trace.from_json(json.loads(json.dumps(TRACE.to_json())))
    assert again == TRACE
    assert again.shapes == TRACE.shapes
    assert hash(again.structure) == hash(TRACE.structure)


def test_names_are_written_once() -> None:
    """A name that a thousand blocks bear takes its place once."""
    data = TRACE.to_json()
    assert len(data["names"]) == len(set(data["names"]))
    assert json.dumps(data).count("encoder.0") == 1


def test_other_schema_is_refused() -> None:
    """A trace of another version is not guessed at."""
    with pytest.raises(ValueError, match="schema 99"):
        Trace.from_json({**TRACE.to_json(), "schema": 99})


# Block 0 is the model's, 1 and 2 are the step's.
RECORDED = Trace(
    batch_size=4,
    seq_len=None,
    structure=TraceStructure(
        order=(0, 1, 2, ~1),
        marks=(
            StageMark(0, -1, "model"),
            StageMark(1, 0, "forward"),
            StageMark(3, 0, "backward"),
            StageMark(4, 0, "end"),
        ),
        operators=("a", "b", "c"),
        modules=("", "first", "second"),
        kinds=("parameter", "activation", "activation"),
    ),
    sizes=(10, 20, 30),
    shapes=("float32[1]", "float32[2]", "float32[3]"),
)


def test_a_block_that_stays() -> None:
    """It is allocated where it should be, and all that comes after it has the next number."""
    trace = add_blocks(RECORDED, [AddedBlock(7, 1, None, "communication", "bucket", "there")])
    assert trace.structure == TraceStructure(
        order=(0, 1, 2, 3, ~2),
        marks=(
            StageMark(0, -1, "model"),
            StageMark(1, 0, "forward"),
            StageMark(4, 0, "backward"),
            StageMark(5, 0, "end"),
        ),
        operators=("a", "bucket", "b", "c"),
        modules=("", "there", "first", "second"),
        kinds=("parameter", "communication", "activation", "activation"),
    )
    assert trace.sizes == (10, 7, 20, 30)
    assert trace.shapes == ("float32[1]", "", "float32[2]", "float32[3]")


def test_a_block_that_goes() -> None:
    """It is released where it should be; where another one comes, it comes after that."""
    added = [AddedBlock(7, 1, 3, "communication", "x"), AddedBlock(8, 3, 4, "communication", "y")]
    trace = add_blocks(RECORDED, added)
    assert trace.structure.order == (0, 1, 2, 3, ~1, 4, ~2, ~4)
    assert trace.sizes == (10, 7, 20, 30, 8)
    assert [mark.position for mark in trace.structure.marks] == [0, 1, 4, 7]


def test_nothing_added_changes_nothing() -> None:
    """Without blocks to add the trace is the same, with shapes or without."""
    assert add_blocks(RECORDED, []) == RECORDED
    assert add_blocks(RECORDED, []).shapes == RECORDED.shapes
    assert add_blocks(replace(RECORDED, shapes=()), [AddedBlock(7, 1, None, "communication", "x")]).shapes == ()


@pytest.mark.parametrize("end", [1, 0])
def test_released_before_it_is_there(end: int) -> None:
    """A block must live for an event at least."""
    with pytest.raises(ValueError, match=f"allocated at 1 cannot be released at {end}"):
        add_blocks(RECORDED, [AddedBlock(7, 1, end, "communication", "x")])


SPANS = st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(1, 4))), max_size=5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SPANS)
def test_still_a_trace(spans: list[tuple[int, int | None]]) -> None:
    """Wherever blocks go, they are numbered as they are allocated, released once, and take their bytes in between."""
    added = [AddedBlock(512, start, end, "communication", "x") for start, end in spans if end is None or end > start]
    trace = add_blocks(RECORDED, added)
    structure = trace.structure
    assert [event for event in structure.order if event >= 0] == list(range(len(trace.sizes)))
    assert len(structure.order) == 4 + len(added) + sum(block.end is not None for block in added)
    alive = alive_at(structure, len(structure.order) - 1)
    kept = sum(block.end is None for block in added)
    assert [structure.kinds[block] for block in alive].count("communication") == kept
    assert replay(structure, trace.sizes, CachingAllocator()).stages[-1].allocated_bytes == 512 * (2 + kept)


def test_streams_are_kept() -> None:
    """In JSON and where blocks are added, which are on the default stream; without streams JSON has none."""
    names = ("", "")
    structure = TraceStructure((0, 1, ~0), (StageMark(0, 0, "forward"),), names, names, names, (0, 3), ((3, 0),))
    trace = Trace(1, None, structure, (1, 2))
    assert Trace.from_json(trace.to_json()) == trace
    longer = add_blocks(trace, [AddedBlock(5, 0, None, "", "")]).structure
    assert (longer.streams, longer.free_completed) == ((0, 0, 3), ((4, 1),))
    plain = replace(trace, structure=replace(structure, streams=(), free_completed=())).to_json()
    assert not {"streams", "free_completed"} & plain.keys()
