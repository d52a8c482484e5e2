"""Recurrent layers on the pretend GPU: where their weights lie, in which type, and what cells keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from batchfinder.simulator.replay import alive_at
from batchfinder.simulator.scaling import fit
from batchfinder.simulator.trace import Trace
from tests.builders import recurrent
from tests.builders.recurrent import FEATURES, HIDDEN

Record = Callable[..., Trace]
B, L = 6, 10
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
