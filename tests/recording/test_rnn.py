"""Tests of batchfinder/recording/rnn.py: where weights lie, in which type, and what layers and cells keep and take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from batchfinder.recording.rnn import MODES, reserve_bytes, workspace_bytes
from batchfinder.simulator.replay import alive_at
from batchfinder.simulator.scaling import fit
from batchfinder.simulator.trace import Trace
from tests.builders import recurrent
from tests.builders.recurrent import FEATURES, HIDDEN

Record = Callable[..., Trace]
B, L = 6, 10
SAMPLES = B * L
WEIGHTS = 3 * HIDDEN * (FEATURES + HIDDEN + 2)
BIAS = 3 * HIDDEN


def of_kind(trace: Trace, kind: str) -> list[int]:
    """The sizes of all blocks of one kind, in the order in which they were allocated."""
    return [size for size, each in zip(trace.sizes, trace.structure.kinds, strict=True) if each == kind]


def alive_after(trace: Trace, stage: str) -> list[int]:
    """The blocks alive when a stage of the first step is over."""
    positions = [mark.position for mark in trace.structure.marks]
    (number,) = (
        i for i, mark in enumerate(trace.structure.marks) if (mark.step, mark.stage) in ((0, stage), (-1, stage))
    )
    return alive_at(trace.structure, positions[number + 1] - 1)


@pytest.mark.parametrize(("kind", "gates"), [("GRU", 3), ("LSTM", 4), ("RNN", 1)])
def test_all_weights_are_one_block(record: Record, kind: str, gates: int) -> None:
    """On the device they are copied into one block, which is all that stays; so are their gradients."""
    trace = record(partial(recurrent.layers, kind), B, L)
    whole = 4 * gates * HIDDEN * (FEATURES + HIDDEN + 2)
    assert [trace.sizes[block] for block in alive_after(trace, "model")] == [whole]
    assert of_kind(trace, "parameter") == [whole]
    assert of_kind(trace, "gradient") == [whole, whole]
    assert sum(of_kind(trace, "optimizer")) == 2 * whole


def test_a_weight_that_is_there_twice_leaves_them_apart(record: Record) -> None:
    """Then each forward copies the weights into a block, which its backward needs."""
    trace = record(partial(recurrent.layers, "GRU", tied=True), B, L)
    assert sorted(of_kind(trace, "parameter")) == sorted([4 * BIAS, 4 * 3 * HIDDEN * FEATURES, 4 * 3 * HIDDEN * HIDDEN])
    kept = [
        trace.sizes[block]
        for block in alive_after(trace, "forward")
        if trace.structure.operators[block] == "aten._cudnn_rnn.default"
    ]
    assert 4 * WEIGHTS in kept


def test_half_weights_are_one_block_too(record: Record) -> None:
    """Under autocast the weights are cast into one block; what is made is half as large, gradients are fp32 again."""
    trace = record(partial(recurrent.layers, "GRU"), B, L, precision="bf16-mixed")
    sizes = {
        operator: [
            trace.sizes[block]
            for block in alive_after(trace, "forward")
            if operator in trace.structure.operators[block]
        ]
        for operator in ("_cudnn_rnn", "zeros")
    }
    output = 2 * B * L * HIDDEN
    assert {output, 6 * output} <= set(sizes["_cudnn_rnn"])
    assert 2 * WEIGHTS in sizes["zeros"]
    assert of_kind(trace, "parameter") == [4 * WEIGHTS]
    assert sum(of_kind(trace, "gradient")) == 2 * 4 * WEIGHTS
    assert max(of_kind(trace, "gradient")) == 4 * 3 * HIDDEN * HIDDEN


def test_no_cublas_workspace(record: Record) -> None:
    """cuDNN multiplies by itself: PyTorch's own workspaces are not taken."""
    assert of_kind(record(partial(recurrent.layers, "GRU"), B, L), "workspace") == []


def test_a_gru_cell(record: Record) -> None:
    """CUDA's fused cell keeps five numbers per unit, and both products for a second derivative."""
    trace = record(recurrent.gru_cell, B)
    alive = [
        trace.sizes[block] for block in alive_after(trace, "forward") if trace.structure.kinds[block] == "activation"
    ]
    unit = 4 * B * HIDDEN
    assert sorted(alive, reverse=True)[:3] == [5 * unit, 3 * unit, 3 * unit]
    made = [
        trace.sizes[block]
        for block, operator in enumerate(trace.structure.operators)
        if operator == "aten._thnn_fused_gru_cell_backward.default"
    ]
    one_step = [3 * unit, 3 * unit, unit, 4 * BIAS, 4 * BIAS]
    assert made == one_step * 2


@pytest.mark.parametrize("options", [{"packed": True, "bidirectional": True}, {"batch_first": True, "num_layers": 2}])
def test_sizes_scale(record: Record, options: dict[str, Any]) -> None:
    """Three recordings give the sizes of a fourth: nothing in the kernels depends on sizes in another way."""
    build = partial(recurrent.layers, "GRU", **options)
    scaled = fit([record(build, *size) for size in ((7, 8), (13, 16), (11, 8))], [8, 16, 24])
    assert scaled is not None
    assert scaled.at(20, 24) == record(build, 20, 24)


def made_by(trace: Trace, operator: str) -> list[int]:
    """The sizes of what one operator allocated in the first step, without empty tensors."""
    (end,) = (mark.position for mark in trace.structure.marks if (mark.step, mark.stage) == (1, "zero_grad"))
    order = [event for event in trace.structure.order[:end] if event >= 0]
    return [trace.sizes[i] for i in order if trace.structure.operators[i] == operator and trace.sizes[i]]


def weights(gates: int, features: int, hidden: int, layers: int) -> int:
    """Bytes of the weights of one direction, with biases."""
    return 4 * sum(gates * hidden * (n + hidden + 2) for n in [features, *[hidden] * (layers - 1)])


def test_the_reserve_space_is_the_printed_one() -> None:
    """Three sizes that users of PyTorch printed come out to the byte."""
    assert reserve_bytes(MODES["gru"], 320, 4, 1, 25_000, 4) == 864_000_000
    assert reserve_bytes(MODES["lstm"], 320, 4, 1, 25_000, 4) == 736_000_000
    assert reserve_bytes(MODES["gru"], 800, 1, 2, 64 * 326, 4) == 801_177_600


def test_the_workspace_is_near_the_printed_one() -> None:
    """It is less than the printed sizes, by no more than the docs say."""
    both_directions = 2 * 3 * 800 * (672 + 800) * 4
    for printed, ours in (
        (13_169_920, workspace_bytes(weights(3, 123, 320, 4), 25_000 * 320 * 4, 1)),
        (17_730_560, workspace_bytes(weights(4, 123, 320, 4), 25_000 * 320 * 4, 1)),
        (313_344_000, workspace_bytes(both_directions, 64 * 326 * 1600 * 4, 2)),
    ):
        assert 4.0e6 < printed - ours < 18.1e6


def test_a_gru_of_two_directions(record: Record) -> None:
    """Its forward makes the output, the state, the reserve space and, while it runs, a workspace."""
    trace = record(partial(recurrent.layers, "GRU", bidirectional=True), B, L)
    both = 2 * weights(3, FEATURES, HIDDEN, 1)
    state, output = 4 * 2 * B * HIDDEN, 4 * SAMPLES * 2 * HIDDEN
    forward = [output, state, 6 * output, both + 2 * output]
    assert made_by(trace, "aten._cudnn_rnn.default") == forward
    # Gradients of the data, the first state and the weights; zeros for the last state's; a workspace.
    backward = [4 * SAMPLES * FEATURES, state, both, state, both + 2 * output]
    assert made_by(trace, "aten._cudnn_rnn_backward.default") == backward


def test_an_lstm_of_three_layers_with_the_batch_first(record: Record) -> None:
    """It has a cell state too; what goes between layers is kept; the data are copied into the order of steps."""
    trace = record(partial(recurrent.layers, "LSTM", num_layers=3, batch_first=True), B, L)
    all_weights = weights(4, FEATURES, HIDDEN, 3)
    data, state, output = 4 * SAMPLES * FEATURES, 4 * 3 * B * HIDDEN, 4 * SAMPLES * HIDDEN
    reserve = (3 * 5 + 2) * output
    assert made_by(trace, "aten._cudnn_rnn.default") == [output, state, state, reserve, data, all_weights]
    backward = [data, state, state, all_weights, state, state, data, all_weights]
    assert made_by(trace, "aten._cudnn_rnn_backward.default") == backward


def test_a_projection_narrows_the_output_alone(record: Record) -> None:
    """Output and hidden state have the projected size, the cell state and what is kept the hidden one."""
    trace = record(partial(recurrent.layers, "LSTM", proj_size=16), B, L)
    projected = 4 * HIDDEN * (FEATURES + 16 + 2) * 4 + 4 * 16 * HIDDEN
    made = [4 * SAMPLES * 16, 4 * B * 16, 4 * B * HIDDEN, 5 * 4 * SAMPLES * HIDDEN, projected]
    assert made_by(trace, "aten._cudnn_rnn.default") == made


@pytest.mark.parametrize("mode", ["forward", "inference"])
def test_no_reserve_space_outside_training(record: Record, mode: str) -> None:
    """In eval mode nothing is kept for a backward."""
    trace = record(partial(recurrent.layers, "GRU"), B, L, mode=mode)
    made = [
        size
        for size, operator in zip(trace.sizes, trace.structure.operators, strict=True)
        if operator == "aten._cudnn_rnn.default" and size
    ]
    assert made == [4 * SAMPLES * HIDDEN, 4 * B * HIDDEN, weights(3, FEATURES, HIDDEN, 1)]
