"""Tests of batchfinder/recording/sparse.py: sparse tensors of coordinates on the fake GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from batchfinder.recording import sparse
from batchfinder.recording.fake_device import FakeDeviceMode, parts_of
from batchfinder.recording.kernel_memory import REPLACED, aten
from batchfinder.simulator.trace import Trace
from batchfinder.training.step import Workload

Record = Callable[..., Trace]

PLACES = 300


class SparseUpdate(nn.Module):
    """A bf16 weight with an fp32 update at few places, as peft's SHiRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(64, 64, dtype=torch.bfloat16))
        self.register_buffer("places", torch.zeros(2, PLACES, dtype=torch.int64))
        self.values = nn.Parameter(torch.zeros(PLACES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.clone()
        weight += torch.sparse_coo_tensor(self.places, self.values * 1.0, (64, 64))
        return nn.functional.linear(x.bfloat16(), weight)


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


def blocks_of(trace: Trace, operator: str, kind: str = "") -> list[int]:
    """The sizes of the blocks that an operator allocated in the first step."""
    last = next((mark.position for mark in trace.structure.marks if mark.step == 1), len(trace.structure.order))
    first = {event for event in trace.structure.order[:last] if event >= 0}
    found = zip(trace.structure.operators, trace.structure.kinds, trace.sizes, strict=True)
    return [
        size for block, (name, of, size) in enumerate(found) if block in first and name == operator and kind in ("", of)
    ]


def test_a_sparse_update_is_summed_in_the_wider_type(record: Record) -> None:
    """The sum and the weight in fp32, then the places as numbers; of the gradient only the places stay."""
    trace = record(lambda: Workload(SparseUpdate(), lambda *_: torch.zeros(2, 64), seq_len_unit="none"), 2)
    whole, indices, values = 4 * 64 * 64, 2 * 8 * PLACES, 4 * PLACES
    assert blocks_of(trace, "aten.add_.Tensor") == [whole, whole, indices, indices // 2]
    assert blocks_of(trace, "aten.sparse_mask.default") == [indices, values, values]
    assert blocks_of(trace, "aten.mul.Tensor", "gradient") == [values]


def test_sparse_gradients_of_an_embedding(record: Record) -> None:
    """The gradient is the tokens' rows and SparseAdam coalesces it: never a tensor as large as the table."""

    def build() -> Workload:
        return Workload(
            Words(),
            lambda batch_size, _: torch.zeros(batch_size, 7, dtype=torch.int64),
            optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters)),
            seq_len_unit="none",
        )

    trace = record(build, 4)
    ids, rows = 8 * 4 * 7, 4 * 4 * 7 * 64
    assert sorted(blocks_of(trace, "aten.clone.default", "gradient")) == [ids, rows]
    assert sorted(blocks_of(trace, "aten._coalesce.default")) == [ids, ids, ids, ids, rows]
    assert sparse.COALESCED in trace.unmodelled


def test_outputs_are_as_pytorch_makes_them() -> None:
    """Layout, types, shapes and places of each operator that has no fake kernel, beside those on a CPU."""
    sparse.register()
    arguments: list[tuple[Any, Callable[..., tuple[torch.Tensor, ...]]]] = [
        (aten.detach.default, lambda one, dense: (one,)),
        (aten.clone.default, lambda one, dense: (one,)),
        (aten._coalesce.default, lambda one, dense: (one,)),
        (aten.add.Tensor, lambda one, dense: (dense, one)),
        (aten.add_.Tensor, lambda one, dense: (dense, one)),
        (aten.add_.Tensor, lambda one, dense: (dense, 1)),
        (aten.sparse_mask.default, lambda one, dense: (dense, one)),
        (aten.sparse_mask.default, lambda one, dense: (one, one.detach())),
    ]
    for operator, chosen in arguments:
        described = []
        for device in ("cpu", "meta"):
            places = torch.tensor([[0, 1, 2], [2, 0, 1]]).to(device)
            one = torch.sparse_coo_tensor(places, torch.ones(3, device=device), (3, 3), check_invariants=False)
            run = operator if device == "cpu" else REPLACED[operator]
            made = run(*chosen(one, torch.ones(3, 3, dtype=torch.bfloat16, device=device)))
            coalesced = made.is_coalesced() if made.is_sparse else None
            described.append((made.layout, coalesced, [(part.dtype, part.shape) for part in parts_of(made)]))
        assert described[0] == described[1], operator


def test_small_sparse_tensors_on_the_cpu_are_real() -> None:
    """Model code that works with their values as it is built gets them."""
    with FakeDeviceMode():
        made = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([2.0, 3.0]), (3,), check_invariants=False)
        assert (made + made).to_dense().tolist() == [4.0, 6.0, 0.0]
