"""Tests of batchfinder/simulator/probe.py, on a step made of formulas."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from batchfinder.find import find_max_batch_size
from batchfinder.results import Shape
from batchfinder.search import Secant
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.probe import SimulatedProbe, predict_max_batch_size
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import StageMark, Structure, Trace
from batchfinder.units import GIB, MIB

SHAPE = Shape(128)


def probe(card: DeviceMemory, per_sample: int = 24 * MIB) -> SimulatedProbe:
    """A gibibyte of weights and something per sample."""

    def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
        structure = Structure((0, 1), (StageMark(0, -1, "model"),), ("a", "b"), ("", ""), ("parameter", "activation"))
        future: Future[Trace] = Future()
        future.set_result(Trace(batch_size, seq_len, structure, (GIB, batch_size * per_sample)))
        return future

    return SimulatedProbe(TraceSource(submit, [128]), card)


@pytest.mark.parametrize("usable", [2 * GIB, 5 * GIB, 11 * GIB])
def test_prediction_is_close(usable: int) -> None:
    """A line through two sizes finds the answer of a linear step, give or take the rounding of one sample."""
    asked = probe(DeviceMemory(12 * GIB, usable))
    answer = find_max_batch_size(asked, SHAPE, search=Secant(tolerance=0.0)).max_batch_size
    assert answer == (usable - GIB) // (24 * MIB)
    assert abs(predict_max_batch_size(asked, SHAPE) - answer) <= 1


def test_prediction_is_at_least_two() -> None:
    """Even a card that is too small gets a guess that can be probed without a recording of its own."""
    assert predict_max_batch_size(probe(DeviceMemory(GIB, GIB // 2)), SHAPE) == 2


def test_no_slope_no_line() -> None:
    """A step that takes the same memory at any size has no line to follow; the larger of the two sizes is the guess."""
    assert predict_max_batch_size(probe(DeviceMemory(12 * GIB, 11 * GIB), per_sample=0), SHAPE) == 32
