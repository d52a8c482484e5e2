"""Tests of batchfinder/simulator/steady_state.py: a longer recording is the answer key."""

from __future__ import annotations

from typing import Any

import pytest

from batchfinder.simulator.steady_state import repeated
from batchfinder.simulator.trace import StageMark, Structure
from tests.builders import few_layers, small
from tests.conftest import Record

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bert, a scaler": ("bert-base", 32, {"precision": "16-mixed"}),
    "gpt2, accumulated": ("gpt2", 32, {"micro_batches": 2, "optimizer": "adamw-fused"}),
    "resnet, momentum": ("resnet50", 64, {"optimizer": "sgd-momentum"}),
}


@pytest.mark.parametrize("case", CASES)
def test_is_what_more_steps_record(case: str, record: Record) -> None:
    """Two steps, the last one taken three more times, are the five that a longer recording has, block by block."""
    spec, length, how = CASES[case]
    two, five = (record(lambda: few_layers.build(spec), 3, length, steps=steps, **how) for steps in (2, 5))
    longer = repeated(two.structure, 3)
    assert longer is not None
    structure, origins = longer
    assert structure == five.structure
    assert tuple(two.sizes[block] for block in origins) == five.sizes


def test_none_more(record: Record) -> None:
    """No times more is the trace itself."""
    trace = record(small.mlp, 8)
    assert repeated(trace.structure, 0) == (trace.structure, tuple(range(len(trace.sizes))))


def test_a_single_pass_is_not_repeated(record: Record) -> None:
    """What a second one would release is not known."""
    assert repeated(record(small.mlp, 8, mode="inference").structure, 3) is None
    assert repeated(Structure((), (), (), (), ()), 3) is None


@pytest.mark.parametrize("released", [0, 1])
def test_what_has_no_place_is_not_guessed(released: int) -> None:
    """A step that releases the model's own memory, or what none of its blocks replaces, cannot be repeated."""
    marks = (StageMark(0, -1, "model"), StageMark(1, 0, "forward"), StageMark(2, 1, "forward"), StageMark(4, 1, "end"))
    names = ("model", "first", "second")
    structure = Structure((0, 1, 2, ~released), marks, names, ("",) * 3, ("",) * 3)
    assert repeated(structure, 1) is None
