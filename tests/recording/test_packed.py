"""Packed sequences on the pretend GPU, where lengths have no values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from batchfinder.simulator.trace import Trace
from tests.builders import recurrent
from tests.builders.recurrent import FEATURES, HIDDEN

Record = Callable[..., Trace]
B, L = 6, 10
DATA, OUTPUT = 4 * B * L * FEATURES, 4 * B * L * HIDDEN


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_and_unpacked(record: Record, batch_first: bool) -> None:
    """Packing copies the data, by way of another copy if the batch comes first; unpacking copies the output."""
    trace = record(partial(recurrent.layers, "GRU", packed=True, batch_first=batch_first), B, L)
    structure = trace.structure
    start, end = (mark.position for mark in structure.marks if (mark.step, mark.stage) in ((0, "forward"), (0, "loss")))
    made = [i for i in structure.order[start:end] if i >= 0]
    by_operator = {
        name: [trace.sizes[i] for i in made if structure.operators[i] == f"aten.{name}.default"]
        for name in ("_pack_padded_sequence", "full", "_cudnn_rnn")
    }
    assert by_operator["_pack_padded_sequence"] == [DATA]
    assert by_operator["full"] == [OUTPUT]
    assert by_operator["_cudnn_rnn"][:2] == [OUTPUT, 4 * B * HIDDEN]
    assert 6 * OUTPUT in by_operator["_cudnn_rnn"]


def test_the_state_has_the_batch_that_was_packed(record: Record) -> None:
    """The number of samples in the first step is read from the packed sequence, and is not made up."""
    trace = record(partial(recurrent.layers, "LSTM", packed=True), B, L)
    states = [
        size
        for size, operator in zip(trace.sizes, trace.structure.operators, strict=True)
        if operator == "aten.zeros.default" and size < 4 * 4 * HIDDEN * HIDDEN
    ]
    assert states[:2] == [4 * B * HIDDEN] * 2


def test_full_lengths_are_told(record: Record) -> None:
    """The recording says that it takes all sequences to be of full length."""
    told = "aten._pack_padded_sequence.default: its output is taken to be as large as it can get"
    assert told in record(partial(recurrent.layers, "GRU", packed=True), B, L).unmodelled
    assert told not in record(partial(recurrent.layers, "GRU"), B, L).unmodelled


def test_the_backward_goes_all_the_way(record: Record) -> None:
    """Packed layers get gradients, as others do."""
    trace = record(partial(recurrent.layers, "GRU", packed=True, batch_first=True), B, L)
    assert "gradient" in trace.structure.kinds
