"""Tests of batchfinder/training/optimizers.py: what optimizers hold, beside the libraries that they are named after."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.errors import InvalidValue, MissingExtra
from batchfinder.simulator.trace import Trace
from batchfinder.training.optimizers import (
    OPTIMIZERS,
    AdamW4bitStates,
    AdamW8bitStates,
    InBackward,
    OffloadedStates,
    PagedAdamW8bitStates,
    Several,
    make_optimizer,
)
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Step
from tests.builders import small
from tests.builders.small import HIDDEN, IN, OUT

Record = Callable[..., Trace]
FROM_LIBRARIES = {
    "adamw-offload": ("torchao.optim", "CPUOffloadOptimizer"),
    "adamw-8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "paged-adamw-8bit": ("bitsandbytes.optim", "PagedAdamW8bit"),
    "adamw-4bit": ("torchao.optim", "AdamW4bit"),
    "lion": ("lion_pytorch", "Lion"),
    "schedule-free": ("schedulefree", "AdamWScheduleFree"),
}


def in_stage(trace: Trace, wanted: str) -> list[list[int]]:
    """For each time a stage comes, the sizes of what is allocated and, below 0, released in it."""
    structure = trace.structure
    ends = [*(mark.position for mark in structure.marks[1:]), len(structure.order)]
    return [
        [trace.sizes[event] if event >= 0 else -trace.sizes[~event] for event in structure.order[mark.position : end]]
        for mark, end in zip(structure.marks, ends, strict=True)
        if mark.stage == wanted
    ]


def held(trace: Trace) -> list[int]:
    """Sizes of the blocks that hold optimizer state."""
    return sorted(n for n, kind in zip(trace.sizes, trace.structure.kinds, strict=True) if kind == "optimizer")


def stepped(optimizer: type[Any], *shapes: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """The states after one step of parameters of these shapes."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    made = optimizer(parameters)
    made.step()
    return [made.state[parameter] for parameter in parameters]


def total(state: dict[str, torch.Tensor]) -> int:
    """Of one parameter, in bytes."""
    return sum(value.nbytes for value in state.values())


def test_8_bit_states() -> None:
    """Two bytes an element and two fp32 scales for each block of 256, begun blocks too; small parameters keep fp32."""
    odd, small_one, even = stepped(AdamW8bitStates, (41, 100), (41,), (16, 256))
    assert total(odd) == 2 * 4100 + 2 * 4 * 17
    assert total(small_one) == 2 * 4 * 41
    assert total(even) == 2 * 4096 + 2 * 4 * 16


def test_paged_states() -> None:
    """From 100,000 elements on, only the scales are in the caching allocator's memory."""
    paged, resident = stepped(PagedAdamW8bitStates, (400, 250), (99, 1000))
    assert total(paged) == 2 * 4 * 391
    assert total(resident) == 2 * 99_000 + 2 * 4 * 387


def test_4_bit_states() -> None:
    """Half a byte an element, a scale per block of 128 and 16 codes, twice; else two states like the parameter."""
    whole, begun, small_one = stepped(AdamW4bitStates, (64, 128), (41, 100), (100,))
    assert total(whole) == 2 * (64 * 64 + 4 * 64 + 4 * 16)
    assert total(begun) == 2 * 4 * 4100
    assert total(small_one) == 2 * 4 * 100


def test_offloaded_states(record: Record) -> None:
    """On the GPU are the states of parameters below 4096 elements, and the gradients until the next step begins."""
    trace = record(small.mlp, 8, optimizer="adamw-offload")
    assert 4 * IN * HIDDEN >= 4 * 4096
    assert [size for size in held(trace) if size >= 4 * 4096] == []
    assert [size for size in held(record(small.mlp, 8)) if size >= 4 * 4096] != []
    gradients = [size for size, kind in zip(trace.sizes, trace.structure.kinds, strict=True) if kind == "gradient"]
    assert gradients.count(4 * IN * HIDDEN) == 2
    small_one = sorted(total(state) for state in stepped(OffloadedStates, (64, 64), (4095,)))
    assert small_one == [0, 2 * 4 * 4095 + 4]


def test_offloading_needs_a_gpu() -> None:
    """torchao's own optimizer copies from one: on a CPU it is an error that says so."""
    pytest.importorskip("torchao.optim")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InvalidValue, match="optimizer: invalid value 'adamw-offload'; expected another on this device"):
        make_optimizer("adamw-offload", nn.Linear(64, 64))


def test_a_second_step_takes_nothing_more() -> None:
    """States are made once, and for parameters with gradients only."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    model[1].requires_grad_(False)
    optimizer = AdamW8bitStates(model.parameters())
    model(torch.zeros(1, 100)).sum().backward()
    optimizer.step()
    before = {name: id(value) for name, value in optimizer.state[model[0].weight].items()}
    optimizer.step()
    assert {name: id(value) for name, value in optimizer.state[model[0].weight].items()} == before
    assert model[1].weight not in optimizer.state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw-8bit", "lion", "schedule-free"])
def test_the_library_allocates_the_same(name: str, record: Record) -> None:
    """The library's own optimizer, on the fake GPU, allocates and releases what the stand-in does, in its order."""
    module, made = FROM_LIBRARIES[name]
    library = pytest.importorskip(module)

    def theirs() -> Any:
        def optimizer(parameters: Any) -> Any:
            one = getattr(library, made)(list(parameters), lr=1e-5)
            if hasattr(one, "train"):
                one.train()
            return one

        return replace(small.mlp(), optimizer=optimizer)

    ours, real = record(small.mlp, 8, optimizer=name), record(theirs, 8)
    assert in_stage(ours, "optimizer") == in_stage(real, "optimizer")
    assert held(ours) == held(real)


@pytest.mark.slow
def test_torchaos_update_takes_the_same(record: Record) -> None:
    """torchao's own 4-bit AdamW, whose states are a tensor's subclass and whose update is compiled, does the same."""
    optim = pytest.importorskip("torchao.optim")
    pytest.importorskip("triton")

    def workload(optimizer: Any = None) -> Any:
        model = nn.Linear(1024, 4096, bias=False)
        return replace(small.mlp(), model=model, make_batch=lambda b, s: (torch.zeros(b, 1024),), optimizer=optimizer)

    ours = record(workload, 2, optimizer="adamw-4bit")
    real = record(lambda: workload(lambda parameters: optim.AdamW4bit(parameters, lr=1e-5)), 2)
    assert in_stage(ours, "optimizer")[1] == in_stage(real, "optimizer")[1]
    assert held(ours) == held(real)


def test_the_library_holds_the_same_4_bit_states() -> None:
    """torchao's own states of a real parameter are as large; its update is compiled, which needs a compiler."""
    optim = pytest.importorskip("torchao.optim")
    for shape in ((64, 128), (41, 100), (100,)):
        parameter = nn.Parameter(torch.zeros(shape))
        theirs = optim.AdamW4bit([parameter])._new_buffer(parameter, True)
        tensors = [getattr(theirs, name) for name in getattr(theirs, "tensor_attrs", ())] or [theirs]
        (ours,) = stepped(AdamW4bitStates, shape)
        assert 2 * sum(tensor.nbytes for tensor in tensors) == total(ours)


@pytest.mark.parametrize("name", FROM_LIBRARIES)
def test_a_real_device_needs_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the error names the package and the extra; the stand-in, which does not train, is never taken."""
    module, made = FROM_LIBRARIES[name]
    package = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False) if module != package else None
    shown = package.replace("_", "-")
    extra = "quantization" if package == "bitsandbytes" else "optimizers"
    with pytest.raises(MissingExtra) as caught:
        make_optimizer(name, nn.Linear(2, 2))
    assert str(caught.value).startswith(f"{made} on a real device needs {shown}, which ")
    assert str(caught.value).endswith(
        f"Install it with: pip install {shown} (or batchfinder with its extra: torch-batchfinder[{extra}])"
    )


class Language(nn.Module):
    """An embedding, a hidden matrix with its bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_muon_takes_hidden_matrices() -> None:
    """Embeddings, the head and what is no matrix are AdamW's."""
    model = Language()
    optimizer = make_optimizer("muon", model)
    assert isinstance(optimizer, Several)
    muon, adamw = optimizer.members
    assert isinstance(muon, torch.optim.Muon)
    assert [id(each) for each in muon.param_groups[0]["params"]] == [id(model.hidden.weight)]
    assert isinstance(adamw, torch.optim.AdamW)
    rest = {id(model.words.weight), id(model.hidden.bias), id(model.head.weight)}
    assert {id(each) for each in adamw.param_groups[0]["params"]} == rest


def test_muons_memory(record: Record) -> None:
    """It holds one state for a hidden matrix, where AdamW holds two."""
    trace = record(small.mlp, 8, optimizer="muon")
    large = [size for size in held(trace) if size > 4 * HIDDEN]
    assert large == sorted([4 * IN * HIDDEN, 4 * HIDDEN * OUT])


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "muon"])
def test_steps_in_the_backward_train_the_same(name: str) -> None:
    """The weights are those of steps that are taken afterwards, and no gradient is left."""
    weights = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        workload = small.mlp()
        workload.model.requires_grad_(True)
        batches = lambda batch_size, seq_len: (torch.linspace(0, 1, batch_size * IN).view(-1, IN),)  # noqa: E731
        step = Step(
            replace(workload, make_batch=batches),
            StepConfig(optimizer=name, optimizer_in_backward=in_backward),
            torch.device("cpu"),
        )
        step.run(2, None)
        assert (workload.model.first.weight.grad is None) == in_backward
        weights.append(workload.model.first.weight.detach())
    assert torch.equal(*weights)


def test_steps_in_the_backward_free_gradients(record: Record) -> None:
    """Each gradient is gone before the next layer's is there: the optimizer's stage has nothing to do."""
    within = record(small.mlp, 8, optimizer="sgd", optimizer_in_backward=True)
    assert [event for events in in_stage(within, "optimizer") for event in events] == []
    live, most = 0, 0
    for size in in_stage(within, "backward")[1]:
        live += size
        most = max(most, live)
    first, second = 4 * IN * HIDDEN, 4 * HIDDEN * OUT
    assert second < first <= most < first + second


def test_hooks_can_be_removed() -> None:
    """After that a backward leaves gradients, as ever."""
    model = nn.Linear(2, 2)
    optimizer = make_optimizer("sgd", model, in_backward=True)
    assert isinstance(optimizer, InBackward)
    optimizer.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_all_have_a_stand_in_where_they_need_one() -> None:
    """What another library's kernels do is never run on the fake GPU."""
    assert {name for name, named in OPTIMIZERS.items() if named.on_fake_gpu is not None} == set(FROM_LIBRARIES)
