"""What one cell of a sweep is asked."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cache import CacheKey
from batchfinder.cli.parser import build_parser
from batchfinder.cli.sweep_request import read_request
from batchfinder.devices import all_gpus
from batchfinder.errors import BatchFinderError, InvalidValue, MissingExtra, RecordingDied, RecordingFailed
from batchfinder.recording.client import RecordingClient
from batchfinder.recording.simulation import Simulation
from batchfinder.report.sweep import Cell
from batchfinder.simulator.scaling import TraceSource
from batchfinder.sizing import simulated_cells
from batchfinder.sizing.cells import ModelCells, cache_key
from batchfinder.sizing.simulated_cells import simulate_cells
from batchfinder.training.spec import RecordingJob, WorkloadFacts
from tests.cli.command import Run

FACTS = WorkloadFacts("f" * 64, 512, "tokens", False, {"torch": "2.13.0"})


class Built(Simulation):
    """A workload that has these facts, and no recording process."""

    def __init__(self, facts: WorkloadFacts) -> None:
        self._facts = facts

    def facts(self) -> WorkloadFacts:
        return self._facts


class Refusing(Built):
    """One whose steps cannot be recorded, for some reason."""

    def __init__(self, reason: BatchFinderError) -> None:
        super().__init__(FACTS)
        self._reason = reason

    def source(self, *_: Any, **__: Any) -> TraceSource:
        raise self._reason

    def on_several(self, counts: Collection[int]) -> dict[int, Simulation]:
        return dict.fromkeys(counts, self)


def cell(options: str = "", facts: WorkloadFacts = FACTS) -> Cell:
    """BERT-base at 64 tokens on the first of the request's GPUs."""
    request = read_request(build_parser().parse_args(["sweep", "--no-cache", *options.split()]))
    return ModelCells("bert-base", Built(facts), (64,), request).cell(64, request.place.cards[0])


def test_the_budget_includes_the_headroom() -> None:
    """What may be used and what of it stays free are two figures."""
    found = cell("--budget 1GiB --headroom 25%")
    assert (found.card.device.usable_bytes, found.headroom_bytes) == (1 << 30, 1 << 28)


def test_an_optimizer_of_its_own() -> None:
    """A workload's own optimizer is named so, whatever was asked for."""
    own = replace(FACTS, brings_optimizer=True)
    assert [cell("", facts).options.optimizer for facts in (FACTS, own)] == ["adamw", "the module's optimizer"]


def test_a_compiled_cell_is_another_question() -> None:
    """What is compiled is in the key, and the key of a model as it is has no word of it."""

    def key(options: str) -> CacheKey:
        request = read_request(build_parser().parse_args(["sweep", "--no-cache", *options.split()]))
        return cache_key(cell(options), FACTS, request)

    assert "compile" not in key("").extra
    assert [key(f"--compile {part}").extra["compile"] for part in ("model", "layers")] == ["model", "layers"]


@pytest.mark.parametrize(
    ("options", "published"),
    [
        ("", 64),
        ("--gpu titanx-maxwell --target-batch-size 256 --attention sdpa", 64),
        ("--gpu t4", None),
        ("--budget 12GiB", None),
        ("--precision bf16-mixed", None),
        ("--attention flash", None),
        ("--gradient-checkpointing", None),
        ("--compile", None),
    ],
)
def test_published(options: str, published: int | None) -> None:
    """The published figure is for a whole Titan X that trains in fp32 with Adam, and stands beside no other cell."""
    assert cell(options).published == published


def test_its_name() -> None:
    """Messages name the model, the length where there is one, and the GPU."""
    assert str(cell("--gpu t4")) == "bert-base at 64 on T4"
    assert str(replace(cell("--gpu t4"), seq_len=None)) == "bert-base on T4"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_many_cards_are_searched_on_all_cores(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that search find the rows that one process does, and leave nothing to it but what is recorded."""
    gpus = [f"--gpu={gpu.name}" for gpu in all_gpus()[:: len(all_gpus()) // 8]]
    asked = ("sweep", "--json", "--no-cache", "--model", "mine:tiny", "--seq-len", "16", "--seq-len", "32", *gpus)

    def rows() -> list[dict[str, Any]]:
        return [{**row, "seconds": 0} for row in run(*asked).json["rows"]]

    with monkeypatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        alone = rows()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delattr(simulated_cells, "search_simulated")
    assert rows() == alone


EACH_KIND = [f"bert-base at 64 on {card}" for card in ("2 x T4", "4 x T4", "2 x A100 40GB", "4 x A100 40GB")]


@pytest.mark.parametrize(
    ("reason", "tried"),
    [
        (RecordingFailed("no such kernel"), EACH_KIND),
        (InvalidValue("attention", "flash", "sdpa"), EACH_KIND),
        (RecordingDied("bert-base", "aten.mm.default", -9), EACH_KIND[:1]),
        (MissingExtra("transformers", "hf", "bert-base"), EACH_KIND[:1]),
    ],
)
def test_each_kind_of_gpu_is_tried_once(reason: BatchFinderError, tried: list[str]) -> None:
    """A kind is a compute capability and a number of GPUs. What is no matter of kinds ends the sweep."""
    gpus = "--gpu T4 --gpu A100-40GB --gpu A100-80GB --gpus 2,4 --strategy fsdp2"
    request = read_request(build_parser().parse_args(["sweep", "--no-cache", *gpus.split()]))
    lines: list[str] = []
    with pytest.raises(type(reason)) as raised:
        list(simulate_cells(ModelCells("bert-base", Refusing(reason), (64, 128), request), lines.append))
    assert raised.value is reason
    assert lines == tried


@pytest.mark.slow
@pytest.mark.exhaustive
def test_only_the_fewest_and_the_most_gpus_are_recorded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the numbers between come of the two, where all that is sharded goes with one over the number."""
    asked = ("sweep", "--json", "--no-cache", "--model", "mine:tiny", "--seq-len", "16", "--gpu", "T4")
    counts: set[int] = set()
    submit = RecordingClient.submit

    def counting(client: RecordingClient, job: RecordingJob) -> Any:
        counts.add(job.config.gpus)
        return submit(client, job)

    monkeypatch.setattr(RecordingClient, "submit", counting)
    rows = run(*asked, "--strategy", "fsdp2", "--gpus", "2,4,8").json["rows"]
    assert (len(rows), counts) == (3, {2, 8})


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_one_kind_of_gpu_cannot_do_leaves_the_others(run: Run) -> None:
    """Flash attention needs Ampere: the rows of A100s are found, and a T4's is said to be missing, and why."""
    models = ("--model", "bert-base", "--seq-len", "16", "--seq-len", "32", "--attention", "flash")
    asked = ("sweep", "--json", "--no-cache", "--precision", "16-mixed", *models)
    three = run(*asked, "--gpu", "A100 80GB", "--gpu", "T4", "--gpu", "A100 40GB")
    assert [(row["gpu"], row["seq_len"]) for row in json.loads(three.out)["rows"]] == [
        ("A100 80GB", 16),
        ("A100 80GB", 32),
        ("A100 40GB", 16),
        ("A100 40GB", 32),
    ]
    assert three.code == 1
    assert three.err.count("this is float16 on 7.5") == 1
    alone = run(*asked, "--gpu", "T4")
    assert (alone.code, alone.out) == (1, "")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_number_of_gpus_that_cannot_be_recorded_leaves_those_between(run: Run, tmp_path: Path) -> None:
    """Four heads of keys and values go on 4 GPUs, which are made of the traces of 2 and 8 where there are such."""
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config, **heads}))
    asked = ("sweep", "--json", "--no-cache", "--model", str(tmp_path), "--seq-len", "16", "--strategy", "tp")
    three = run(*asked, "--gpu", "A100 80GB", "--gpus", "2,4,8")
    assert three.code == 1
    assert "4 heads of keys and values" in three.err
    two = run(*asked, "--gpu", "A100 80GB", "--gpus", "2,4")
    sizes = [[row["max_batch_size"] for row in json.loads(found.out)["rows"]] for found in (three, two)]
    assert len(sizes[0]) == 2
    assert sizes[0] == sizes[1]
