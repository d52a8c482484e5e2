"""The comparison with the peers: what counts as training, its tables, and what it says of batchfinder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder.units import MIB
from benchmarks.peer.comparison import largest, search, train
from benchmarks.peer.report import claims, markdown, short
from benchmarks.peer.work import CASES, STATE, Loop, seed, steps_of

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "peers-2-cores.json").read_text())


@pytest.mark.parametrize(
    "start", [{}, {5: True}, {40: True, 110: False}, {97: True, 98: False}, {98: False, 200: False}]
)
def test_the_largest_is_found_from_what_is_known(start: dict[int, bool]) -> None:
    """97 trains and 98 does not; sizes are trained once, and what is known already is not trained again."""
    known = {size: {"trains": trains} for size, trains in start.items()}
    trained: list[int] = []

    def train(size: int) -> dict[str, Any]:
        trained.append(size)
        return {"trains": size <= 97}

    assert largest(known, train) == 97
    assert len(trained) == len(set(trained)) == len(known) - len(start)


def test_a_training_sees_two_epochs() -> None:
    """At the largest size of each case at least 200 steps, and two epochs and more."""
    for fit, case in zip(CASES, RESULT["cases"], strict=True):
        for size in case["true"].values():
            assert steps_of(fit, size) >= 200
            assert steps_of(fit, size) * size > 2 * fit.samples


def test_the_documentation_shows_the_committed_result() -> None:
    """The tables in docs/peers.md and in the README are what the script makes of the file."""
    assert markdown(RESULT) in (ROOT / "docs" / "peers.md").read_text()
    assert short(RESULT) in (ROOT / "README.md").read_text()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """112 MiB beside what the process has, of which cuBLAS's workspaces may be 64."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 112 * MIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_training_and_a_search_on_a_card(little_memory: None) -> None:
    """A size that is too large does not train; training changes the state that is compared, and a search does not."""
    assert [train(STATE, "loop", size)["trains"] for size in (4, 4096)] == [True, False]
    seed(0)
    loop = Loop(STATE)
    before = loop.state()
    loop.train(4)
    after = loop.state()
    assert {name for name in before if before[name] != after[name]} == {"parameters", "optimizer", "random numbers"}
    del loop
    found = search("batchfinder loop", STATE, states=True)
    assert found["before"] == found["after"] == before
    assert 4 <= found["returned"] < 4096


def test_what_does_not_hold_is_said() -> None:
    """A row that misses is named with its case and size, and one that failed counts as missed."""
    rows = [
        {"peer": "batchfinder loop", "returned": 90, "share": 0.9, "trains": False, "retries": 2, "out_of_memory": 2},
        {"peer": "batchfinder callback", "failed": "died"},
        {"peer": "toma, from 512", "returned": 64, "share": 0.6, "trains": True, "retries": 0, "out_of_memory": 2},
    ]
    changed = {"batchfinder loop": [], "batchfinder callback": ["gradients"], "toma, from 512": []}
    assert claims({"cases": [{"name": "net", "rows": rows}], "changed": changed}) == [
        "every answer trains: 0 of 2; not loop on net (90); callback on net (died)",
        "it does so without the allocator giving its cache back: 0 of 2; not loop on net (90); callback on net (died)",
        "at least 0.97 of the largest, without headroom: 0 of 2; not loop on net (90); callback on net (died)",
        "at most one out-of-memory error: 0 of 2; not loop on net (90); callback on net (died)",
        "the training state is unchanged: 1 of 2",
    ]
