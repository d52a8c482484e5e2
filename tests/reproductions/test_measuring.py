"""Cells by real steps: on the CPU under a limit here, where there is no GPU."""

from __future__ import annotations

import sys

import pytest

from batchfinder.devices import present_gpus
from batchfinder.errors import CardNeeded
from batchfinder.measure.child_probe import GpuFacts
from batchfinder.recording.simulation import StepConfig
from batchfinder.reproductions import base
from batchfinder.reproductions.base import RealStep, require_card
from batchfinder.training.spec import WorkloadSpec
from batchfinder.units import GIB, MIB

VECTORS = WorkloadSpec("tests.builders.small:mlp")
STEP = RealStep("cpu", VECTORS, StepConfig(), limit_bytes=48 * MIB, seq_len=1)
# A sample takes a kilobyte for itself and some more for its activations.
SURELY, SURELY_NOT = 1 << 8, 1 << 17


@pytest.mark.skipif(sys.platform != "linux", reason="limits on a CPU's memory need Linux")
def test_rungs() -> None:
    """A ladder's answer is the last rung that ran before the first that did not, and 0 where none did."""
    assert STEP.last_rung((64, SURELY, SURELY_NOT, 2)) == SURELY
    assert STEP.last_rung((SURELY_NOT, 2)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits on a CPU's memory need Linux")
def test_largest() -> None:
    """The largest batch is found within the limit, from a prediction that is off."""
    assert SURELY < STEP.largest(predicted=1500) < SURELY_NOT


@pytest.mark.skipif(bool(present_gpus()), reason="this machine has a GPU")
def test_no_card() -> None:
    """Without a GPU the error has the memory that the most demanding table needs, and its name."""
    with pytest.raises(
        CardNeeded, match=r"reproduce large --measured needs a GPU with 3\.00 GiB free.*none here"
    ) as seen:
        require_card({"small": GIB, "large": 3 * GIB, "middling": 2 * GIB})
    assert seen.value.needed_bytes == 3 * GIB


def test_a_card_that_is_too_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free decides, not what the card has; enough is enough."""
    card = GpuFacts("Tesla K80", 11 * GIB, 2 * GIB, (3, 7))
    monkeypatch.setattr(base, "look_at", lambda device: card)
    with pytest.raises(CardNeeded, match=r"of the Tesla K80 here 2\.00 GiB is free"):
        require_card({"table": 2 * GIB + 1})
    assert require_card({"table": 2 * GIB}) == "cuda:0"
