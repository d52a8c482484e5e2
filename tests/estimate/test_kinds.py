"""Tests of batchfinder/estimate/estimate.py."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from batchfinder.estimate.estimate import NAMES, Kinds, bytes_by_kind, kind_of
from batchfinder.simulator.trace import Trace
from tests.builders.small import HIDDEN, IN, OUT

PARAMETERS = 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)


def test_every_kind_has_a_name() -> None:
    """The names are those of all fields, in their order."""
    assert list(NAMES) == list(asdict(Kinds()))


def test_total() -> None:
    """The kinds sum to the total, whichever are shown."""
    kinds = Kinds(parameters=1, activations=20, fragmentation=300, context=4000)
    assert kinds.total == sum(kinds.shown().values()) == 4321


def test_communication_is_shown_where_there_is_some() -> None:
    """One GPU has no communication to speak of; every other kind is always shown."""
    assert list(Kinds().shown()) == [name for name in NAMES if name != "communication"]
    assert list(Kinds(communication=1).shown()) == list(NAMES)


def test_every_kind_of_a_recording_is_known(mlp: Trace, bert: Trace) -> None:
    """Whatever kind a recording gives a block, it has a place."""
    for trace in (mlp, bert):
        assert {kind_of(trace, block) for block in range(len(trace.sizes))} <= set(NAMES)


def test_bytes_are_those_asked_for(mlp: Trace) -> None:
    """Bytes by kind are the tensors' own, not the blocks'."""
    held = bytes_by_kind(mlp, range(len(mlp.sizes)))
    assert held["parameters"] == PARAMETERS
    assert held["gradients"] == 2 * PARAMETERS  # one set in each step
    assert held["optimizer"] == 2 * PARAMETERS
    assert sum(held.values()) == sum(mlp.sizes)
    assert bytes_by_kind(mlp, []) == {}


def test_an_unknown_kind_is_a_bug(mlp: Trace) -> None:
    """A kind without a place is not passed over."""
    structure = mlp.structure.__class__((0,), (), ("a",), ("",), ("new",))
    with pytest.raises(KeyError):
        kind_of(Trace(1, None, structure, (1,)), 0)
