"""Recordings that several tests look at."""

from __future__ import annotations

import pytest

from batchfinder.simulator.trace import Trace
from tests.builders import few_layers, small
from tests.conftest import Record


@pytest.fixture(scope="session")
def mlp(record: Record) -> Trace:
    """A perceptron with a batch so large that its activations are most of it."""
    return record(small.mlp, 4096)


@pytest.fixture(scope="session")
def bert(record: Record) -> Trace:
    """BERT-base with two layers."""
    return record(lambda: few_layers.build("bert-base"), 8, 64)
