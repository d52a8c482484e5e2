"""The recording against reality: the same step run for real on the CPU, allocation by allocation.

Compared are the sizes of all new storages, in order, in the forward, the loss, the backward and the optimizer. Left out
is what differs between the devices by nature: the cuBLAS workspace; attention kernels and dropout, whose operators are
others on the CPU; AdamW's `step` counters, which are on the CPU in both cases and so are none of a GPU's memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.recording.kernel_memory import SCRATCH, aten
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Step, Workload

Record = Callable[..., Trace]
By_Stage = dict[tuple[int, str], list[int]]
STAGES = ("forward", "loss", "backward", "optimizer")


class Watch(TorchDispatchMode):
    """Notes the bytes of every storage on the CPU when it is first seen.

    Args:
        sums: the operators by which the autograd engine sums gradients where nobody watches, in order: in place then,
            but not where Python has a reference to one of them, as here.
        scatters: the same of those that put gradients in their places among zeros.
    """

    def __init__(self, sums: Iterator[str], scatters: Iterator[str]) -> None:
        super().__init__()
        self.sums, self.scatters = sums, scatters
        self.stage = (-1, "")
        self.sizes: By_Stage = defaultdict(list)
        self.seen: list[torch.UntypedStorage] = []
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            self.note(leaf, None)
        output = func(*args, **(kwargs or {}))
        if func is aten.add.Tensor and torch._C._current_autograd_node() and next(self.sums) == "aten::add_":
            self.note(output, None)
        if func is aten.scatter.src and next(self.scatters) == "aten::scatter_":
            self.note(output, None)
        for leaf in torch.utils._pytree.tree_leaves(output):
            self.note(leaf, self.stage)
        return output

    def note(self, leaf: Any, stage: tuple[int, str] | None) -> None:
        """Storages are kept alive, so that an address means one storage only."""
        if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage()._cdata in self.known:
            return
        self.known.add(leaf.untyped_storage()._cdata)
        self.seen.append(leaf.untyped_storage())
        if stage is not None:
            self.sizes[stage].append(leaf.untyped_storage().nbytes())


class Encoder(nn.Module):
    """Two transformer layers with attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.projections = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.wides = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        batch, length, width = x.shape
        for i in range(2):
            q, k, v = (
                part.view(batch, length, 4, width // 4).transpose(1, 2)
                for part in self.projections[i](self.norms[2 * i](x)).chunk(3, dim=-1)
            )
            weights = (q @ k.transpose(-1, -2) / math.sqrt(width // 4)).softmax(-1)
            x = x + self.outputs[i]((weights @ v).transpose(1, 2).reshape(batch, length, width))
            x = x + self.wides[i](self.norms[2 * i + 1](x))
        return x


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW in the form that a GPU takes by itself."""
    return torch.optim.AdamW(parameters, lr=1e-5, foreach=True)


def perceptron() -> Workload:
    """Three linear layers."""
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5))
    return Workload(model, lambda b, s: (torch.zeros(b, 20),), optimizer=adamw, sums_in_place=True)


def encoder() -> Workload:
    """A small transformer."""
    return Workload(
        Encoder(), lambda b, s: (torch.zeros(b, s or 1, dtype=torch.long),), optimizer=adamw, sums_in_place=True
    )


def convolutions() -> Workload:
    """A small network for images."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 6 * 6, 10),
    )  # fmt: skip
    loss = nn.CrossEntropyLoss()
    return Workload(
        model,
        lambda b, s: (torch.zeros(b, 3, 16, 16),),
        loss=lambda out, batch: loss(out, torch.zeros(out.size(0), dtype=torch.long, device=out.device)),
        optimizer=adamw,
        sums_in_place=True,
    )


class Selected(nn.Module):
    """What is largest of each vector, and the largest sum of a sorted one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.linear(x)
        return wide.max(dim=1).values.sum() + wide.topk(3).values.sum() + wide.sort().values.cumsum(1).amax()


def selected() -> Workload:
    """A layer of which single values are selected."""
    return Workload(Selected(), lambda b, s: (torch.zeros(b, 20),), optimizer=adamw, sums_in_place=True)


def really(build: Callable[[], Workload], batch_size: int, seq_len: int | None) -> By_Stage:
    """Sizes per stage of a real step on the CPU."""

    def on_stage(step: int, stage: str, micro_batch: int) -> None:
        watch.stage = (step, stage)

    def run(workload: Workload) -> None:
        Step(workload, StepConfig(), torch.device("cpu")).run(batch_size, seq_len, on_stage)

    with torch.autograd.set_multithreading_enabled(False):
        watch = Watch(iter(()), iter(()))
        with profile(use_kineto=False) as profiler:
            run(build())
        inside = [(event.name, str(getattr(event.cpu_parent, "name", ""))) for event in profiler.function_events]
        engine = "autograd::engine::evaluate_function"
        watch = Watch(
            iter([name for name, outer in inside if name.startswith("aten::add") and outer.startswith(engine)]),
            iter([name for name, outer in inside if name.startswith("aten::scatter") and not outer.endswith(name)]),
        )
        with watch:
            run(build())
        assert not list(watch.sums)
        assert not list(watch.scatters)
    return watch.sizes


def recorded(trace: Trace) -> By_Stage:
    """Sizes per stage of a recording, without workspaces."""
    sizes: By_Stage = defaultdict(list)
    structure = trace.structure
    for position, event in enumerate(structure.order):
        if event >= 0 and trace.sizes[event] and structure.kinds[event] != "workspace":
            mark = [mark for mark in structure.marks if mark.position <= position][-1]
            sizes[mark.step, mark.stage].append(trace.sizes[event])
    return sizes


@pytest.mark.parametrize(
    ("build", "batch_size", "seq_len"),
    [(perceptron, 7, None), (encoder, 3, 12), (convolutions, 5, None), (selected, 6, None)],
)
def test_sizes_are_those_of_a_real_step(
    record: Record, monkeypatch: pytest.MonkeyPatch, build: Callable[[], Workload], batch_size: int, seq_len: int | None
) -> None:
    """Every allocation of a real step is in the recording, in the same stage and order, with the same bytes.

    But for what CUDA's softmax takes besides, and its sums of whole numbers, and a CPU's do not.
    """
    for func in (aten._softmax_backward_data.default, aten.sum.default, aten.sum.dim_IntList):
        monkeypatch.delitem(SCRATCH, func)
    real, pretended = really(build, batch_size, seq_len), recorded(record(build, batch_size, seq_len))
    for step in (0, 1):
        for stage in STAGES:
            theirs = [size for size in real[step, stage] if stage != "optimizer" or size > 4]
            assert pretended[step, stage] == theirs, (step, stage)
