"""Tests of batchfinder/simulator/trace.py."""

from __future__ import annotations

import json

import pytest

from batchfinder.simulator.trace import StageMark, Structure, Trace

TRACE = Trace(
    batch_size=3,
    seq_len=None,
    structure=Structure(
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
