"""The comparison with the peers: its finders, its card, its counts, its judge, and a case of the committed result."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from batchfinder.results import Shape
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.units import MIB
from benchmarks.peer.card import Meter, SimulatedCard
from benchmarks.peer.comparison import SIMULATED, simulated_works
from benchmarks.peer.finders import PEERS
from benchmarks.peer.judge import MeasurementFailed, isolated, search
from benchmarks.peer.report import claims, markdown
from benchmarks.peer.work import Work
from tests.builders.retaking import retaking

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "peers-2-cores.json").read_text())
(CASE,) = (case for case in SIMULATED if (case.model, case.size) == ("gpt2", 3))
PEER = {peer.name: peer for peer in PEERS}
# One of each package; batch-finder goes by the resident memory of the process, so it tries other sizes each time.
AGAIN = (
    "Lightning binsearch",
    "accelerate, from 128",
    "toma, from 512",
    "torch-max-mem, from 8192",
    "batchfinder callback",
    "batchfinder loop",
)
INSTALLED = [name for name in AGAIN if PEER[name].version]
COMMITTED = next(case for case in RESULT["cases"] if case["name"] == "gpt2 at 1024, 6.52 GiB")


@pytest.fixture(scope="module", autouse=True)
def quick(nothing_old_is_collected: None) -> Iterator[None]:
    """The nets are small, the machine is shared, and every peer collects garbage after each try."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    import_module("benchmarks.peer.trainer")
    gc.collect()
    gc.freeze()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def work() -> Work:
    """A recorded step of GPT-2 on a card that has the memory of 3 samples."""
    ((_, work),) = simulated_works((CASE,))
    return work


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_a_peer_finds_again_what_the_committed_result_says(work: Work, name: str) -> None:
    """Each installed peer tries the sizes that are in the committed file, in that order, and returns the same."""
    (committed,) = (row for row in COMMITTED["rows"] if row["peer"] == name)
    package = PEER[name].package
    if RESULT["versions"][package] != PEER[name].version:
        pytest.skip(f"the result is of {package} {RESULT['versions'][package]}")
    found = search(name, replace(work, meter=Meter()))
    counted = ("returned", "tried", "probes", "steps", "out_of_memory", "sizes_failed")
    assert {key: found[key] for key in counted} == {key: committed[key] for key in counted}
    assert work.card is not None
    assert work.card.trains(found["returned"]) is committed["trains"] is True
    if package == "batchfinder":
        assert found["changed"] == []


@pytest.mark.slow
def test_the_card_fails_as_a_real_one(work: Work) -> None:
    """Its largest size is the committed one; the next one up raises PyTorch's own error."""
    card = work.card
    assert card is not None
    largest = card.largest(CASE.size)
    assert largest == COMMITTED["true"]["loop"]
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. .*simulated"):
        card.forward(largest + 1)


def test_the_card_has_the_segments_of_the_step_before() -> None:
    """A further step of a size is the one after it; another size, an error and a new try begin with an empty card."""
    card = SimulatedCard(SimulatedProbe(TraceSource(retaking, [None]), DeviceMemory(20 * MIB, 20 * MIB)), Shape())
    taken = []
    for size in (12, 12, 14, 14, 14, 12, 14):
        before = card.retries()
        card.forward(size)
        card.backward(size)
        taken.append(card.retries() - before)
    assert taken == [0, 0, 1, 2, 2, 0, 1]
    card.reset_peak()
    before = card.retries()
    card.forward(14)
    assert card.retries() - before == 1
    with pytest.raises(torch.OutOfMemoryError):
        card.forward(22)
    before = card.retries()
    card.forward(14)
    assert card.retries() - before == 1


def stepped(meter: Meter, size: int, error: Exception | None = None) -> None:
    """One step, and how it ended."""
    with meter.counting_errors("cpu"):
        meter.begin(size)
        if error is not None:
            raise error


def test_the_meter_counts_tries_and_errors() -> None:
    """A new size and the step after an error begin a try; only errors of memory count."""
    meter = Meter()
    stepped(meter, 1)
    stepped(meter, 1)
    with pytest.raises(torch.OutOfMemoryError):
        stepped(meter, 8, torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(ValueError, match="x"):
        stepped(meter, 8, ValueError("x"))
    assert (meter.counts.steps, meter.counts.tries, meter.counts.failed) == (4, [1, 8, 8], [8])


@pytest.mark.slow
def test_the_judge_sees_what_does_not_train() -> None:
    """Under a limit of 1 GiB, in a process of its own, two samples train and ten million do not."""
    script = (
        "import torch\nfrom benchmarks.peer.judge import trains\nfrom benchmarks.peer.work import Work\n"
        "torch.set_num_threads(1)\nwork = Work('transformer', budget_bytes=1 << 30)\n"
        "print([trains(work, 'loop', size) for size in (2, 10_000_000, 0)])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[True, False, False]\n"


def die() -> None:
    """End as a crash does."""
    os._exit(7)


def test_a_measurement_that_fails_says_why() -> None:
    """An error, a death and a hang each end one measurement, with a reason."""
    assert isolated(max, 1, 2, seconds=60) == 2
    with pytest.raises(MeasurementFailed, match=r"^ValueError: invalid literal"):
        isolated(int, "x", seconds=60)
    with pytest.raises(MeasurementFailed, match=r"^the process died \(7\)$"):
        isolated(die, seconds=60)
    with pytest.raises(MeasurementFailed, match=r"^timed out after 0.05 s$"):
        isolated(time.sleep, 60, seconds=0.05)


def test_the_documentation_shows_the_committed_result() -> None:
    """The tables in docs/peers.md are what the script makes of the file."""
    assert markdown(RESULT) in (ROOT / "docs" / "peers.md").read_text()


def test_what_does_not_hold_is_said() -> None:
    """A row that misses is named with its size, and one that failed counts as missed."""
    rows = [
        {"peer": "batchfinder loop", "returned": 90, "share": 0.9, "trains": True, "probes": 5, "sizes_failed": 1}
        | {"out_of_memory": 2, "changed": []},
        {"peer": "batchfinder loop, exact", "failed": "died"},
    ]
    said = claims([{"name": "net", "kind": "cpu", "cap": None, "true": {"loop": 100, "trainer": 100}, "rows": rows}])
    assert said[:2] == [
        "every answer trains: 1 of 2; except net (largest 100): died",
        "at least 0.99 of the largest: 0 of 2; except net (largest 100): 90, died",
    ]
