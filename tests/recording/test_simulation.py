"""Tests of batchfinder/recording/simulation.py: a simulated card fails the way a real one does."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from batchfinder.recording.simulation import simulated_step
from batchfinder.results import Shape
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import StageMark, Structure, Trace

MIB = 1 << 20
STRUCTURE = Structure((0, ~0), (StageMark(0, 0, "forward"),), ("aten.mm.default",), ("",), ("temporary",))


@pytest.fixture
def probe() -> SimulatedProbe:
    """A step of one block of 30 MiB per sample, on a card of 1 GiB of which 900 MiB can be had."""

    def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
        future: Future[Trace] = Future()
        future.set_result(Trace(batch_size, seq_len, STRUCTURE, (30 * MIB * batch_size,)))
        return future

    return SimulatedProbe(TraceSource(submit, [None]), DeviceMemory(1 << 30, 900 * MIB))


def test_what_fits_is_measured(probe: SimulatedProbe) -> None:
    """A size that fits returns what was seen."""
    assert simulated_step(probe, 30, Shape()).peak_reserved_bytes == 900 * MIB


def test_what_does_not_fit_raises_what_torch_raises(probe: SimulatedProbe) -> None:
    """The error is torch's own type, with PyTorch's sentence and the word simulated."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        simulated_step(probe, 31, Shape())
    assert str(caught.value).startswith(
        "CUDA out of memory. Tried to allocate 930.00 MiB. GPU 0 (simulated) has a total capacity of 1024.00 MiB "
        "of which 900.00 MiB is free."
    )
