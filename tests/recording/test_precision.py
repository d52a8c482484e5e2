"""Tests of batchfinder/recording/autocast.py and of what each precision does to memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from batchfinder.recording import autocast
from batchfinder.simulator.trace import Trace
from tests.builders import small
from tests.builders.small import HIDDEN, IN, OUT

Record = Callable[..., Trace]


def casts(trace: Trace, step: int, stage: str) -> list[int]:
    """The sizes of copies made in one stage."""
    marks = list(trace.structure.marks)
    (number,) = (i for i, mark in enumerate(marks) if (mark.step, mark.stage) == (step, stage))
    events = trace.structure.order[marks[number].position : marks[number + 1].position]
    return [trace.sizes[i] for i in events if i >= 0 and trace.structure.operators[i] == "aten._to_copy.default"]


def alive_after(trace: Trace, position: int) -> set[int]:
    """Blocks alive before an event."""
    alive: set[int] = set()
    for event in trace.structure.order[:position]:
        (alive.add if event >= 0 else alive.discard)(event if event >= 0 else ~event)
    return alive


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_weight_casts_are_cached_once(record: Record, precision: str) -> None:
    """A weight used twice is cast once per forward, to half its size: weight, bias and input make three casts."""
    trace = record(small.twice, 8, precision=precision)
    for step in (0, 1):
        assert sorted(casts(trace, step, "forward")) == sorted([2 * IN * IN, 2 * IN, 2 * 8 * IN])


def test_unsaved_casts_end_with_the_region(record: Record) -> None:
    """The bias's cast is nobody's but the cache's, and goes when autocast ends; the weight's stays for the backward."""
    trace = record(small.twice, 8, precision="bf16-mixed")
    structure = trace.structure
    forward, loss, backward = (
        next(mark.position for mark in structure.marks if (mark.step, mark.stage) == (0, stage))
        for stage in ("forward", "loss", "backward")
    )
    cast = {trace.sizes[i]: i for i in structure.order[forward:loss] if i >= 0 and "_to_copy" in structure.operators[i]}
    assert cast[2 * IN] in alive_after(trace, loss)
    assert cast[2 * IN] not in alive_after(trace, backward)
    assert cast[2 * IN * IN] in alive_after(trace, backward)


def test_mixed_keeps_fp32_weights_and_states(record: Record) -> None:
    """Parameters, gradients and states stay in fp32; activations are of half size."""
    full, mixed = record(small.mlp, 8), record(small.mlp, 8, precision="bf16-mixed")
    for kind in ("parameter", "gradient", "optimizer"):
        assert [n for n, k in zip(mixed.sizes, mixed.structure.kinds, strict=True) if k == kind] == [
            n for n, k in zip(full.sizes, full.structure.kinds, strict=True) if k == kind
        ] or kind == "gradient"
    total = 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
    gradients = [n for n, k in zip(mixed.sizes, mixed.structure.kinds, strict=True) if k == "gradient"]
    assert sum(gradients) == 2 * total
    relu = [n for n, op in zip(mixed.sizes, mixed.structure.operators, strict=True) if op == "aten.relu.default"]
    assert set(relu) == {2 * 8 * HIDDEN}


def test_grad_scaler_steps(record: Record) -> None:
    """In 16-mixed the scaler finds no infinity in the pretend gradients, so the optimizer does step: states exist."""
    trace = record(small.mlp, 8, precision="16-mixed")
    states = [n for n, kind in zip(trace.sizes, trace.structure.kinds, strict=True) if kind == "optimizer"]
    assert sum(states) >= 8 * (IN * HIDDEN + HIDDEN * OUT)
    assert any("_amp" in op or "unscale" in op for op in trace.structure.operators) or any(
        "read" in text for text in trace.unmodelled
    )


def test_bf16_true_halves_everything(record: Record) -> None:
    """In bf16-true weights, gradients, states and inputs are all of half size, and nothing is cast."""
    full, half = record(small.mlp, 8), record(small.mlp, 8, precision="bf16-true")
    assert full.structure.order == half.structure.order
    for whole, halved, kind in zip(full.sizes, half.sizes, full.structure.kinds, strict=True):
        if kind != "workspace" and whole > 4:
            assert halved * 2 == whole
    assert "aten._to_copy.default" not in half.structure.operators


def test_every_listed_operator_exists() -> None:
    """A name in the policy lists that this PyTorch does not know would be a silent gap."""
    names = [*autocast.LOWER_PRECISION, *autocast.FP32, *autocast.FP32_SET_OPT_DTYPE, *autocast.PROMOTE]
    assert [name for name in names if autocast._find(name) is None] == []
    assert len(names) == len(set(names))


def test_softmax_and_losses_run_in_fp32(record: Record) -> None:
    """What autocast runs in fp32 on CUDA does so here: the softmax's output is of four bytes per element."""

    def build() -> object:
        from torch import nn

        from batchfinder.training.step import Workload

        model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Softmax(dim=-1), nn.LayerNorm(HIDDEN))
        return Workload(model, small.vectors)

    trace = record(build, 8, precision="bf16-mixed")
    sizes = {op: n for op, n in zip(trace.structure.operators, trace.sizes, strict=True) if n >= 2 * 8 * HIDDEN}
    assert sizes["aten.addmm.default"] == 2 * 8 * HIDDEN
    assert sizes["aten._softmax.default"] == 4 * 8 * HIDDEN
    assert sizes["aten.native_layer_norm.default"] == 4 * 8 * HIDDEN
    assert torch.bfloat16.itemsize == 2
