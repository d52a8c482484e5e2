"""Tests of batchfinder/recording/kernel_memory.py: memory that belongs to kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchfinder.recording import kernel_memory
from batchfinder.recording.kernel_memory import SCRATCH, aten, cublas_workspace_bytes
from batchfinder.simulator.replay import alive_at
from batchfinder.simulator.trace import Trace
from batchfinder.training.workload import Workload

Record = Callable[..., Trace]
HEADS, LENGTH, WIDTH = 4, 128, 256


class Attention(nn.Module):
    """One projection for query, key and value, and PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)


def attention() -> Workload:
    """Attention on a batch of sequences of vectors."""
    return Workload(Attention(), lambda batch_size, seq_len: (torch.zeros(batch_size, seq_len or LENGTH, WIDTH),))


def odd_heads() -> Workload:
    """Attention that no fused kernel takes: a mask, and a head of 60 elements."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 60)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.project(x)[:, None]
            mask = torch.zeros(x.size(1), x.size(1), device=x.device, dtype=query.dtype)
            return F.scaled_dot_product_attention(query, query, query, mask)

    return Workload(Odd(), lambda batch_size, seq_len: (torch.zeros(batch_size, seq_len or LENGTH, WIDTH),))


def blocks_of(trace: Trace, operator: str) -> list[int]:
    """The blocks that an operator made, outputs and scratch."""
    return [i for i, name in enumerate(trace.structure.operators) if name == operator]


@pytest.mark.parametrize(
    ("capability", "size"),
    [
        ((5, 2), 8_519_680),
        ((7, 0), 8_519_680),
        ((8, 0), 8_519_680),
        ((8, 9), 8_519_680),
        ((9, 0), 33_554_432),
        ((10, 0), 33_554_432),
        ((12, 0), 33_554_432),
    ],
)
def test_cublas_workspace(capability: tuple[int, int], size: int) -> None:
    """2 x 4 MiB + 8 x 16 KiB, and 32 MiB from Hopper on."""
    assert cublas_workspace_bytes(capability) == size


def test_a_workspace_for_each_thread(record: Record) -> None:
    """The first product in the forward takes one, the first in the backward another, and both stay."""
    trace = record(attention, 2, LENGTH)
    workspaces = [i for i, kind in enumerate(trace.structure.kinds) if kind == "workspace"]
    assert [trace.sizes[i] for i in workspaces] == [8_519_680, 8_519_680]
    assert set(workspaces) <= set(alive_at(trace.structure, len(trace.structure.order) - 1))
    forward, backward = (trace.structure.order.index(i) for i in workspaces)
    marks = {mark.stage: mark.position for mark in trace.structure.marks if mark.step == 0}
    assert marks["forward"] <= forward < marks["loss"] <= marks["backward"] <= backward < marks["optimizer"]


def test_products_with_an_output_type_ask_for_cublas() -> None:
    """Every overload of a matrix product that allocates its output is listed."""
    for packet in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
        for overload in packet.overloads():
            if "out" not in overload:
                assert getattr(packet, overload) in kernel_memory.MATRIX_PRODUCTS


def test_safe_softmax_keeps_the_softmax_and_two_masks() -> None:
    """Scores of 2 x 3 x 8 x 16: 3072 bytes of softmax, 768 of masked scores, 48 of masked rows."""
    scores = torch.empty(2, 3, 8, 16, device="meta")
    assert SCRATCH[aten._safe_softmax.default](scores, -1) == [3072, 768, 48]
    assert SCRATCH[aten._safe_softmax.default](torch.empty(0, 4, device="meta"), -1) == []


def test_scratch_comes_after_the_outputs_and_goes_at_once(record: Record) -> None:
    """The trace of an attention backward: three gradients, then delta, the product and its sum, then these released."""
    trace = record(attention, 2, LENGTH, capability=(6, 1), optimizer="sgd")
    made = blocks_of(trace, "aten._scaled_dot_product_efficient_attention_backward.default")
    gradient, row_sums = 4 * 2 * LENGTH * WIDTH, 4 * 2 * HEADS * LENGTH
    one_step = [gradient, gradient, gradient, row_sums, gradient, row_sums]
    assert [trace.sizes[i] for i in made] == 2 * one_step
    outputs, scratch = made[:3], made[3:6]
    position = trace.structure.order.index(outputs[0])
    assert list(trace.structure.order[position : position + 9]) == [
        *outputs,
        *scratch,
        *(~i for i in reversed(scratch)),
    ]
    assert {trace.structure.kinds[i] for i in scratch} == {"temporary"}


@pytest.mark.parametrize(("capability", "kernel"), [((7, 5), "efficient"), ((8, 6), "flash")])
def test_half_precision_gathers_dq_in_fp32(record: Record, capability: tuple[int, int], kernel: str) -> None:
    """After the three gradients, of two bytes per element, come the rows' sums and dq, of four."""
    trace = record(attention, 2, LENGTH, capability=capability, precision="16-mixed", optimizer="sgd")
    made = blocks_of(trace, f"aten._scaled_dot_product_{kernel}_attention_backward.default")
    row_sums, dq = 4 * 2 * HEADS * LENGTH, 4 * 2 * LENGTH * WIDTH
    assert [trace.sizes[i] for i in made] == 2 * [dq // 2, dq // 2, dq // 2, row_sums, dq]


def test_math_adds_the_mask_in_place(record: Record) -> None:
    """Without a fused kernel there are scores, their softmax and its scratch; no third matrix for the mask."""
    trace = record(odd_heads, 2, 64, capability=(8, 0), precision="bf16-mixed", mode="forward")
    scores = 4 * 2 * 64 * 64
    softmax = blocks_of(trace, "aten._safe_softmax.default")
    assert [trace.sizes[i] for i in softmax[:4]] == [scores, scores, scores // 4, 2 * 64]
    first = trace.structure.order.index(softmax[0])
    assert [trace.sizes[i] for i in alive_at(trace.structure, first)].count(scores) == 2
    assert not blocks_of(trace, "aten.add.Tensor")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_passing_over_writes_to_lists_changes_nothing(
    record: Record, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """An optimizer whose in-place operators on lists are passed over has the trace of one that runs them all."""
    short = record(attention, 8, optimizer=optimizer)
    monkeypatch.setattr(kernel_memory, "only_writes", lambda func, args: False)
    assert record(attention, 8, optimizer=optimizer) == short


def test_only_in_place_operators_on_the_pretend_gpu_are_passed_over() -> None:
    """Lists of tensors on the CPU are written to, as an optimizer reads its count of steps; lists made are made."""
    counts = [torch.zeros(())]
    assert not kernel_memory.only_writes(aten._foreach_add_.Scalar, (counts, 1))
    assert not kernel_memory.only_writes(aten._foreach_add.Scalar, ([], 1))
    assert not kernel_memory.only_writes(aten.add_.Scalar, (counts[0], 1))
