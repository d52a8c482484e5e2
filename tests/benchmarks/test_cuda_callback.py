"""The callback compared with a plain run, on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cuda.callback import ConvNet, compare, same_weights
from benchmarks.cuda.cells import CALLBACK_ENVIRONMENT, STAND_IN_CALLBACK_CASES


def test_the_callback_is_compared_with_a_plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: the size is the cap, training is bit for bit the same, and the second start certifies the size."""
    for name, value in CALLBACK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)  # Lightning sets it for good where it is not set
    (case,) = [case for case in STAND_IN_CALLBACK_CASES if case["net"] == "transformer"]
    found = compare(**case)
    assert (found["batch_size"], found["stopped_by"], found["out_of_memory"]) == (8, "CAP", 0)
    assert found["probes"] == len(found["tried"]) >= 1
    assert found["losses_equal"] is found["weights_equal"] is True
    assert (found["second_start"]["batch_size"], found["second_start"]["probes"]) == (8, 1)


def test_other_weights_are_told() -> None:
    """A single bit makes two modules differ."""
    one, other = (ConvNet(2, rows=4, side=4, width=2) for _ in range(2))
    assert not same_weights(one, other)
    other.load_state_dict(one.state_dict())
    assert same_weights(one, other)
    with torch.no_grad():
        last = list(other.parameters())[-1]
        last[0] = torch.nextafter(last[0], torch.tensor(9.0))
    assert not same_weights(one, other)
