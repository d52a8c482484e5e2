"""Tests of batchfinder/lightning/prediction_server.py, on steps made of formulas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future

from batchfinder.lightning.prediction_server import HOST_SHARE, live_bytes, on_card, on_host
from batchfinder.results import Shape
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.probe import SimulatedProbe, predict_max_batch_size
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import StageMark, Structure, Trace
from batchfinder.units import MIB


def probe_of(sizes: Callable[[int], tuple[int, ...]], usable: int) -> SimulatedProbe:
    """A step whose first block is a workspace, whose others are alive at one time."""

    def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
        blocks = sizes(batch_size)
        kinds = ("workspace", *(["temporary"] * (len(blocks) - 1)))
        order = (*range(len(blocks)), ~1)
        names = ("a",) * len(blocks)
        future: Future[Trace] = Future()
        structure = Structure(order, (StageMark(0, -1, "model"),), names, names, kinds)
        future.set_result(Trace(batch_size, seq_len, structure, blocks))
        return future

    return SimulatedProbe(TraceSource(submit, [None]), DeviceMemory(max(usable, 1 << 30), usable))


def test_on_a_card_segments_count_and_on_the_host_bytes_do() -> None:
    """A card's answer is the replay's, workspace and all; a host's is bytes without it, less the kernels' share."""
    probe = probe_of(lambda batch_size: (8 * MIB, 2 * MIB, 1000 * batch_size), 64 * MIB)
    card = on_card(probe)
    assert probe(card, Shape()).fits
    assert not probe(card + 1, Shape()).fits
    assert live_bytes(probe.trace(100, Shape())) == 2 * MIB + 100_000
    assert on_host(probe) == int(HOST_SHARE * ((62 * MIB) // 1000))


def test_far_beyond_the_cap_a_line_will_do() -> None:
    """So that the search's first try is the cap itself; near it the answer is searched for."""
    probe = probe_of(lambda batch_size: (8 * MIB, 2 * MIB, MIB * batch_size), 513 * MIB)
    exact = on_card(probe)
    assert on_card(probe, cap=exact) == on_card(probe, cap=exact // 2 + 10) == exact
    assert on_card(probe, cap=20) == predict_max_batch_size(probe, Shape()) > exact


def test_the_far_end_needs_no_torch() -> None:
    """It starts at once, and what records is a process of its own."""
    code = "import sys, batchfinder.lightning.prediction_server; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
