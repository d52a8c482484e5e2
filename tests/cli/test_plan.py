"""Tests of batchfinder/cli/plan.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cli.main import main
from batchfinder.cli.options import card
from batchfinder.cli.plan import Planner
from batchfinder.recording.simulation import Simulation, search_simulated
from batchfinder.report.progress import StatusLine
from batchfinder.results import Shape
from batchfinder.training.spec import StepOptions

pytestmark = pytest.mark.usefixtures("forked_recorders")

LAYERS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "vocab_size": 2000,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LAYERS},
    "bert": {"architectures": ["BertForMaskedLM"], "model_type": "bert", **LAYERS},
}

WHOLE = bool(os.environ.get("BATCHFINDER_WHOLE_GRID"))
"""With the variable, precisions and optimizers are in the grid too, and budgets lie on either side of each need."""
KEPT: set[str] = set() if WHOLE else {"precision", "optimizer"}
CHANGES = (-1, 1) if WHOLE else (1,)


@pytest.fixture(scope="module", params=MODELS)
def planner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked_recorders: None
) -> Iterator[Planner]:
    """Of a small model at 2048 tokens, for 8 samples; the tests choose the card."""
    file = tmp_path_factory.mktemp(request.param) / "config.json"
    file.write_text(json.dumps(MODELS[request.param]))
    asked = StepOptions()
    with StatusLine() as line, Simulation(asked.workload(str(file)), asked.step()) as simulation:
        yield Planner(str(file), asked, card("a100 40gb", "1GiB"), 8, Shape(2048), simulation, line)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_plan_is_the_first_of_the_grid_that_trains(planner: Planner) -> None:
    """Every combination by itself, at budgets from less than the least to all that is needed: the answer is the first
    that trains, nothing that changes as little about training and trains computes less again, and its micro-batch
    trains.
    """
    grid = planner.combinations(KEPT, ())
    needed: dict[StepOptions, int] = {}
    flops: dict[StepOptions, int] = {}
    for options in grid:
        seen = planner.one_sample(options)
        if seen is not None:
            needed[options] = seen[0]
            whole = replace(options, loss="default")
            flops[options] = planner.probe(whole).trace(1, planner.shape, exact=True).flops
    chunked = [options for options in needed if options.loss == "chunked"]
    assert len(needed) == len(grid) - len(grid) // 2 + len(chunked)
    assert bool(chunked) == ("llama" in planner.model), "the chunked loss is for causal models, and refused for others"
    planner.refused.clear()
    answers = []
    context = planner.card.device.context_bytes
    for budget in sorted({((size - context) >> 20) + change for size in needed.values() for change in CHANGES}):
        planner.card = card("a100 40gb", f"{budget}MiB")
        probes = {options: planner.probe(options) for options in needed}
        trains = [one for one in needed if probes[one].steady_state(1, planner.shape, exact=True).fits]
        found = planner.plan(grid)
        if not trains:
            assert (found.plan, found.rows, found.least_bytes) == (None, (), min(needed.values()))
            continue
        assert found.plan is not None
        answer = found.rows[-1].options
        assert answer == trains[0], budget
        alike = [one for one in trains if one.precision == answer.precision]
        assert flops[answer] == min(flops[one] for one in alike)
        micro = found.plan.micro_batch_size
        assert micro <= search_simulated(probes[answer], planner.shape, planner.target).max_batch_size
        assert found.plan.effective_batch_size == planner.target
        answers.append(answer)
    assert len(set(answers)) > 2, "the budgets ask for different plans"


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main(["plan", *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.exhaustive
@pytest.mark.slow
def test_each_row_adds_one_option(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """From what was asked for to the answer: what is kept stays, and each row says what it saves and costs."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODELS["llama"]))
    where = ("--model", str(file), "--seq-len", "2048", "--gpu", "a100 40gb", "--target-batch-size", "4")
    found = planned(capsys, *where, "--budget", "55MiB", "--keep", "precision", "--keep", "optimizer")
    rows = found["rows"]
    assert found["trains"]
    assert [row["change"] for row in rows] == ["", "--gradient-checkpointing full", "--loss chunked"]
    assert all(row["precision"] == "fp32" for row in rows)
    peaks, flops = [row["peak_bytes"] for row in rows], [row["flops"] for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert flops[0] < flops[1] == flops[2]
    assert found["micro_batch_size"] * found["accumulation"] == 4
    nothing = planned(capsys, *where, "--budget", "20MiB", "--keep", "precision", "--keep", "optimizer")
    assert (nothing["trains"], nothing["rows"]) == (False, [])
    assert nothing["least_bytes"] > 20 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--target-batch-size: missing; expected a number: how many samples an optimizer step is to see"),
        (("--target-batch-size", "8", "--allow", "magic"), "--allow: invalid value 'magic'; expected one of lora"),
        (("--target-batch-size", "8", "--optimizer-in-backward"), "expected a plan without it: no gradients are left"),
        (("--target-batch-size", "8", "--gpu", "t4", "--instance", "p3.2xlarge"), "either a --gpu or an --instance"),
        (("--target-batch-size", "8", "--mode", "inference"), "expected train: a plan is for training"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str) -> None:
    """With what was expected, before anything is recorded."""
    assert main(["plan", *options]) == 1
    assert message in capsys.readouterr().err
