"""Steps of benchmarks/exactness.py, recorded on the fake device: the peaks that PyTorch's CUDA build had in them."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from batchfinder.devices import device_for, find_gpu
from batchfinder.recording.simulation import Simulation
from batchfinder.simulator.steady_state import SimulatedProbe
from benchmarks.exactness import RESULT, Cell, cells, recorded, spec_of

pytestmark = pytest.mark.slow


def exact_steps() -> list[tuple[Cell, list[int]]]:
    """Steps whose peaks were equal, with these, in the order of the benchmark."""
    by_name = {cell.name: cell for cell in cells()}
    result = json.loads(RESULT.read_text())
    here = {name: version(name) for name in result["versions"]}
    if here != result["versions"]:
        pytest.skip(f"its result is of {result['versions']}, and {here} are installed")
    return [(by_name[row["cell"]], row["real"]) for row in result["rows"] if row["real"] == row["fake-device"]]


@pytest.mark.parametrize("every", [144, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_peaks_are_equal_to_the_byte(every: int, tmp_path: Path) -> None:
    """Allocated and reserved, of one in so many: models on three cards, as the benchmark's result has them."""
    chosen = exact_steps()[every // 2 :: every]
    assert len(chosen) >= 360 // every
    first, _ = chosen[0]
    probes: list[SimulatedProbe] = []
    with Simulation(spec_of(first, tmp_path), first.step) as opened:
        for cell, _ in chosen:
            simulation = opened.with_spec(spec_of(cell, tmp_path), cell.step)
            probes.append(simulation.probe(device_for(find_gpu(cell.gpu)), [cell.seq_len]))
            probes[-1].traces.ask(cell.batch_size, cell.seq_len)
        different = [
            (cell.name, real, found)
            for probe, (cell, real) in zip(probes, chosen, strict=True)
            if (found := recorded(probe, cell)) != real
        ]
    assert different == []
