"""The twelve cells of the Titan X table, at their answers and one above, recorded without any scaling."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from batchfinder.devices import device_for, find_gpu
from batchfinder.recording.simulation import Simulation, StepConfig, search_simulated
from batchfinder.reproductions.published import published_titan_x
from batchfinder.results import Shape, Stop
from batchfinder.simulator.steady_state import SteadyState
from batchfinder.training.spec import WorkloadSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_recorders")]

TITAN_X = device_for(find_gpu("titan x"))
SEQ_LENS = (64, 128, 256, 320, 384, 512)
CELLS = tuple((model, seq_len) for model in ("bert-base", "bert-large") for seq_len in SEQ_LENS)


@dataclass(frozen=True)
class Cell:
    """What was found for one cell, and the replays of recordings at that size and the next."""

    answer: int
    stop: Stop
    at_answer: Future[SteadyState] | None
    above: Future[SteadyState]
    scaled: tuple[SteadyState, SteadyState]


@pytest.fixture(scope="module")
def cells() -> Iterator[dict[tuple[str, int], Cell]]:
    """All cells are searched first; then the recordings that confirm them run side by side."""
    simulations = {
        model: Simulation(WorkloadSpec("batchfinder.models:build_workload", {"spec": model}), StepConfig())
        for model in ("bert-base", "bert-large")
    }
    found = {}
    with ThreadPoolExecutor(4) as pool:
        for model, seq_len in CELLS:
            probe = simulations[model].probe(TITAN_X, SEQ_LENS)
            shape = Shape(seq_len)
            outcome = search_simulated(probe, shape)
            size = outcome.max_batch_size
            found[model, seq_len] = Cell(
                size,
                outcome.stop,
                pool.submit(probe.exact_outlook, size, shape) if size else None,
                pool.submit(probe.exact_outlook, size + 1, shape),
                (probe.outlook(max(size, 1), shape), probe.outlook(size + 1, shape)),
            )
        yield found
        for cell in found.values():
            cell.above.cancel()
    for simulation in simulations.values():
        simulation.close()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seq_len"), CELLS)
def test_an_unscaled_recording_agrees(cells: dict[tuple[str, int], Cell], model: str, seq_len: int) -> None:
    """Recorded at the answer the step fits; recorded one sample above it does not, as the scaled one says."""
    cell = cells[model, seq_len]
    assert cell.stop is Stop.EXACT
    if cell.at_answer is not None:
        assert cell.at_answer.result().fits
        assert cell.at_answer.result() == cell.scaled[0]
    assert cell.above.result() == cell.scaled[1]
    above = cell.above.result()
    assert not above.fits, f"{model} at {seq_len} also runs with {cell.answer + 1}"
    assert above.timeline.oom is None or "simulated" in above.timeline.oom.message


@pytest.mark.slow
def test_answers_are_no_less_than_published(cells: dict[tuple[str, int], Cell]) -> None:
    """Nothing that TensorFlow 1.11 trained on this card in 2018 is called too large today; longer means fewer."""
    assert all(found.answer >= published_titan_x()[cell] for cell, found in cells.items())
    for model in ("bert-base", "bert-large"):
        answers = [cells[model, seq_len].answer for seq_len in SEQ_LENS]
        assert answers == sorted(set(answers), reverse=True)
