"""What recomputing activations costs, and the cells of the Titan X table recorded without any scaling."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification

from batchfinder.devices import device_for, find_gpu
from batchfinder.recording.answers import search_simulated
from batchfinder.recording.simulation import Simulation
from batchfinder.reproductions.published import published_titan_x
from batchfinder.reproductions.titan_x import checkpointing_cost, forward_flops
from batchfinder.results import SearchResult, Shape, StopReason
from batchfinder.simulator.steady_state import SimulatedProbe, SteadyState
from batchfinder.training.spec import StepConfig, WorkloadSpec

FIGURES = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}


def counted(model: BertForSequenceClassification, batch_size: int, seq_len: int, backward: bool) -> int:
    """What PyTorch counts."""
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=torch.zeros(batch_size, dtype=torch.long)).loss
        if backward:
            loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("batch_size", "seq_len"), [(1, 16), (2, 40)])
def test_against_the_counter(batch_size: int, seq_len: int) -> None:
    """A forward, a step and a step with checkpointing take exactly what the formula says."""
    plain = BertForSequenceClassification(BertConfig(**FIGURES, attn_implementation="eager")).train()
    layers, rest = forward_flops(FIGURES, seq_len)
    assert counted(plain, batch_size, seq_len, backward=False) == batch_size * (layers + rest)
    step = counted(plain, batch_size, seq_len, backward=True)
    assert step == 3 * batch_size * (layers + rest)
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    cost = counted(checkpointed, batch_size, seq_len, backward=True) / step
    assert cost == pytest.approx(checkpointing_cost(FIGURES, seq_len), rel=1e-12)
    assert cost < 4 / 3


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_recorders")]

TITAN_X = device_for(find_gpu("titan x"))
SEQ_LENS = (64, 128, 256, 320, 384, 512)
CELLS = tuple((model, seq_len) for model in ("bert-base", "bert-large") for seq_len in SEQ_LENS)


@dataclass(frozen=True)
class Cell:
    """The replays of recordings at the size that was found for one cell and at the next."""

    answer: int
    at_answer: Future[SteadyState] | None
    above: Future[SteadyState]
    scaled: tuple[SteadyState, SteadyState]


@pytest.fixture(scope="module")
def probes() -> Iterator[dict[str, SimulatedProbe]]:
    """One for each model."""
    with ExitStack() as stack:
        found = {}
        for model in ("bert-base", "bert-large"):
            spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": model})
            found[model] = stack.enter_context(Simulation(spec, StepConfig())).probe(TITAN_X, SEQ_LENS)
        yield found


@pytest.fixture(scope="module")
def answers(probes: dict[str, SimulatedProbe]) -> dict[tuple[str, int], SearchResult]:
    """What is found for each cell."""
    return {(model, seq_len): search_simulated(probes[model], Shape(seq_len)) for model, seq_len in CELLS}


@pytest.fixture(scope="module")
def cells(
    probes: dict[str, SimulatedProbe], answers: dict[tuple[str, int], SearchResult]
) -> Iterator[dict[tuple[str, int], Cell]]:
    """The recordings that confirm them run side by side."""
    found = {}
    with ThreadPoolExecutor(4) as pool:
        for (model, seq_len), outcome in answers.items():
            probe, shape, size = probes[model], Shape(seq_len), outcome.max_batch_size
            found[model, seq_len] = Cell(
                size,
                pool.submit(probe.steady_state, size, shape, exact=True) if size else None,
                pool.submit(probe.steady_state, size + 1, shape, exact=True),
                (probe.steady_state(max(size, 1), shape), probe.steady_state(size + 1, shape)),
            )
        yield found
        for cell in found.values():
            cell.above.cancel()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seq_len"), CELLS)
@pytest.mark.exhaustive
def test_an_unscaled_recording_agrees(cells: dict[tuple[str, int], Cell], model: str, seq_len: int) -> None:
    """Recorded at the answer the step fits; recorded one sample above it does not, as the scaled one says."""
    cell = cells[model, seq_len]
    if cell.at_answer is not None:
        assert cell.at_answer.result().fits
        assert cell.at_answer.result() == cell.scaled[0]
    assert cell.above.result() == cell.scaled[1]
    above = cell.above.result()
    assert not above.fits, f"{model} at {seq_len} also runs with {cell.answer + 1}"
    assert above.timeline.oom is None or "simulated" in above.timeline.oom.message


@pytest.mark.slow
def test_answers_are_no_less_than_published(answers: dict[tuple[str, int], SearchResult]) -> None:
    """Nothing that TensorFlow 1.11 trained on this card in 2018 is called too large today; longer means fewer."""
    assert all(found.stop is StopReason.EXACT for found in answers.values())
    assert all(found.max_batch_size >= published_titan_x()[cell] for cell, found in answers.items())
    for model in ("bert-base", "bert-large"):
        sizes = [answers[model, seq_len].max_batch_size for seq_len in SEQ_LENS]
        assert sizes == sorted(set(sizes), reverse=True)
