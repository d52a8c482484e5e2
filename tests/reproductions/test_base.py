"""What every published table shares: its recordings, its cells as JSON, and its cells by real steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from batchfinder.devices import present_gpus
from batchfinder.errors import CardNeeded, UserCodeFailed
from batchfinder.measure.child_probe import ChildProcessProbe, GpuFacts
from batchfinder.recording.client import RecordingClient
from batchfinder.recording.simulation import Simulation
from batchfinder.reproductions import published
from batchfinder.reproductions.bert_2019 import last_rung
from batchfinder.reproductions.published import Context, Reproduction, largest_measured, require_card, row
from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec
from batchfinder.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("forked_recorders")

FIRST, SECOND = WorkloadSpec("tests.builders.small:mlp"), WorkloadSpec("tests.builders.small:checkpointed")
FAILING = WorkloadSpec("tests.builders.small:failing", {"where": "forward"})


@pytest.fixture(scope="module")
def context() -> Iterator[Context]:
    """One recording process."""
    with Simulation(FIRST, StepConfig()) as simulation:
        yield Context(simulation, lambda status: None)


def test_each_workload_is_its_own(context: Context) -> None:
    """A workload's trace is that of a process of its own, whatever was asked for before it."""
    for spec in (FIRST, SECOND):
        shared = context.source(spec, StepConfig(), (7, 0), [None])
        with RecordingClient(spec) as alone:
            assert shared.recorded(7, None) == alone.submit(RecordingJob(StepConfig(), (7, 0), 7, None)).result()
        assert (7, None) not in shared.unscaled


def test_the_way_of_stepping_counts(context: Context) -> None:
    """The same workload with another optimizer is another trace."""
    adamw, sgd = (context.source(FIRST, StepConfig(optimizer=name), (7, 0), [None]) for name in ("adamw", "sgd"))
    assert "optimizer" in adamw.at(9, None).structure.kinds
    assert "optimizer" not in sgd.at(9, None).structure.kinds


def test_an_error_names_the_workload(context: Context) -> None:
    """What fails is called by its own name, not by that of the workload the process began with."""
    context.source(FIRST, StepConfig(), (7, 0), [None])
    source = context.source(FAILING, StepConfig(), (7, 0), [None])
    with pytest.raises(UserCodeFailed, match=r"tests\.builders\.small:failing at batch size 13 raised"):
        source.recorded(13, None)


def test_ratio() -> None:
    """Ours by published, to four places; none where one is missing or the published figure is 0."""
    assert row("a cell", 3, 1) == {"cell": "a cell", "published": 3, "ours": 1, "ratio": 0.3333}
    assert row("a cell", 0, 5)["ratio"] is None
    assert row("a cell", None, 5)["ratio"] is None
    assert row("a cell", 5, None)["ratio"] is None
    assert row("a cell", 5, 0)["ratio"] == 0


def test_more() -> None:
    """What else there is to say of a cell stands beside it, and a reproduction keeps the rows' order."""
    rows = (row("one", 1, 1, unit="MiB"), row("two", 2, 2))
    assert Reproduction("name", rows, (), ("note",)).to_json() == {
        "name": "name",
        "rows": [
            {"cell": "one", "published": 1, "ours": 1, "ratio": 1.0, "unit": "MiB"},
            {"cell": "two", "published": 2, "ours": 2, "ratio": 1.0},
        ],
        "notes": ["note"],
    }


VECTORS = WorkloadSpec("tests.builders.small:mlp")
LIMIT = 48 * MIB
# A sample takes a kilobyte for itself and some more for its activations.
SURELY, SURELY_NOT = 1 << 8, 1 << 17


@pytest.mark.skipif(sys.platform != "linux", reason="limits on a CPU's memory need Linux")
@pytest.mark.slow
def test_rungs() -> None:
    """A ladder's answer is the last rung that ran before the first that did not, and 0 where none did."""
    with ChildProcessProbe(VECTORS, StepConfig(), "cpu", LIMIT) as probe:
        assert last_rung(probe, 1, (64, SURELY, SURELY_NOT, 2)) == SURELY
        assert last_rung(probe, 1, (SURELY_NOT, 2)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits on a CPU's memory need Linux")
@pytest.mark.slow
@pytest.mark.exhaustive
def test_largest() -> None:
    """The largest batch is found within the limit, from a prediction that is off."""
    assert SURELY < largest_measured("cpu", VECTORS, StepConfig(), LIMIT, seq_len=1, predicted=1500) < SURELY_NOT


@pytest.mark.skipif(bool(present_gpus()), reason="this machine has a GPU")
def test_no_card() -> None:
    """Without a GPU the error has the memory that the most demanding table needs, and its name."""
    with pytest.raises(
        CardNeeded, match=r"reproduce large --measured needs a GPU with 3\.00 GiB free.*finds no GPU here"
    ) as seen:
        require_card({"small": GIB, "large": 3 * GIB, "middling": 2 * GIB})
    assert seen.value.needed_bytes == 3 * GIB


def test_a_card_that_is_too_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free decides, not what the card has; enough is enough."""
    card = GpuFacts("Tesla K80", 11 * GIB, 2 * GIB, (3, 7))
    monkeypatch.setattr(published, "query_gpu", lambda device: card)
    with pytest.raises(CardNeeded, match=r"of the Tesla K80 here 2\.00 GiB is free"):
        require_card({"table": 2 * GIB + 1})
    assert require_card({"table": 2 * GIB}) == "cuda:0"
