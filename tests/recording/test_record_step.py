"""Tests of batchfinder/recording/record_step.py and recording.py, on models whose memory can be counted by hand."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from batchfinder.recording import operands
from batchfinder.simulator.replay import alive_at
from batchfinder.simulator.trace import Trace
from batchfinder.training.step import Workload
from tests.builders import small
from tests.builders.small import HIDDEN, IN, OUT

Record = Callable[..., Trace]
PARAMETERS = 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)
WORKSPACE = 8_519_680


@pytest.fixture(scope="module")
def mlp(record: Record) -> Trace:
    """Two AdamW steps of the perceptron at batch size 8."""
    return record(small.mlp, 8)


def of_kind(trace: Trace, kind: str) -> int:
    """Bytes of all blocks of one kind."""
    return sum(n for n, k in zip(trace.sizes, trace.structure.kinds, strict=True) if k == kind)


def stage_of(trace: Trace, block: int) -> tuple[int, str]:
    """Where a block was allocated."""
    position = trace.structure.order.index(block)
    mark = [mark for mark in trace.structure.marks if mark.position <= position][-1]
    return mark.step, mark.stage


def alive_after(trace: Trace, step: int, stage: str) -> list[int]:
    """The blocks alive when a stage is over."""
    marks = trace.structure.marks
    (number,) = (i for i, mark in enumerate(marks) if (mark.step, mark.stage) == (step, stage))
    end = marks[number + 1].position if number + 1 < len(marks) else len(trace.structure.order)
    return alive_at(trace.structure, end - 1)


def peak(trace: Trace, step: int) -> int:
    """The most bytes alive at one time in one step."""
    order, marks = trace.structure.order, trace.structure.marks
    live = most = 0
    for position, event in enumerate(order):
        live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        if [mark.step for mark in marks if mark.position <= position][-1] == step:
            most = max(most, live)
    return most


def test_parameters(mlp: Trace) -> None:
    """The model's parameters are the first blocks, in fp32, and are never released."""
    assert mlp.sizes[:4] == (4 * IN * HIDDEN, 4 * HIDDEN, 4 * HIDDEN * OUT, 4 * OUT)
    assert mlp.structure.kinds[:4] == ("parameter",) * 4
    assert set(range(4)) <= set(alive_at(mlp.structure, len(mlp.structure.order) - 1))
    assert of_kind(mlp, "parameter") == PARAMETERS


def test_gradients(mlp: Trace) -> None:
    """A gradient is as large as its parameter, is made in the backward, and goes with zero_grad of the next step."""
    assert of_kind(mlp, "gradient") == 2 * PARAMETERS
    for step in (0, 1):
        made = [i for i, kind in enumerate(mlp.structure.kinds) if kind == "gradient" and stage_of(mlp, i)[0] == step]
        assert {stage_of(mlp, block) for block in made} == {(step, "backward")}
        assert set(made) <= set(alive_after(mlp, step, "optimizer"))
        if step == 0:
            assert not set(made) & set(alive_after(mlp, 1, "zero_grad"))


def test_gradients_of_a_lightning_module(record: Record) -> None:
    """Where zero_grad waits for the loss, the last step's gradients are alive at the end of the forward."""
    trace = record(lambda: dataclasses.replace(small.mlp(), zero_grad_after_loss=True), 8)
    gradients = {i for i, kind in enumerate(trace.structure.kinds) if kind == "gradient"}
    waiting = gradients & set(alive_after(trace, 1, "loss"))
    assert sum(trace.sizes[i] for i in waiting) == PARAMETERS
    assert not gradients & set(alive_after(trace, 1, "zero_grad"))


def test_optimizer_state(mlp: Trace) -> None:
    """AdamW's two moments are made in the first optimizer step, in the parameters' size, and stay."""
    states = [i for i, kind in enumerate(mlp.structure.kinds) if kind == "optimizer"]
    assert sum(mlp.sizes[i] for i in states) == 2 * PARAMETERS
    assert {stage_of(mlp, block) for block in states} == {(0, "optimizer")}
    assert set(states) <= set(alive_at(mlp.structure, len(mlp.structure.order) - 1))


def test_activations(mlp: Trace) -> None:
    """A perceptron keeps its input and its ReLU's output; the linear layer's own output goes."""
    alive = alive_after(mlp, 0, "forward")
    activations = {i: mlp.sizes[i] for i in alive if mlp.structure.kinds[i] == "activation"}
    assert list(activations.values()) == [4 * 8 * HIDDEN]
    assert [mlp.sizes[i] for i in alive if mlp.structure.kinds[i] == "input"] == [4 * 8 * IN]


def test_second_step_peaks_higher(record: Record) -> None:
    """Adam's state appears at the end of the first step, so the second step's backward has it on top."""
    trace = record(small.mlp, 4096)
    # The old batch lives until the new one is there, and the backward's workspace from the first backward on.
    assert peak(trace, 1) - peak(trace, 0) == 2 * PARAMETERS


def test_stages(mlp: Trace) -> None:
    """Each step has its stages in order, and every event belongs to one."""
    stages = [(mark.step, mark.stage) for mark in mlp.structure.marks]
    each = ["zero_grad", "batch", "forward", "loss", "backward", "optimizer"]
    assert stages == [(-1, "model"), *((step, stage) for step in (0, 1) for stage in each), (1, "end")]
    assert mlp.structure.marks[0].position == 0
    forward = [stage_of(mlp, i) for i, name in enumerate(mlp.structure.operators) if name == "aten.addmm.default"]
    assert {stage for _, stage in forward} == {"forward"}
    backward = [stage_of(mlp, i) for i, name in enumerate(mlp.structure.operators) if name == "aten.mm.default"]
    assert {stage for _, stage in backward} == {"backward"}


def test_modules(mlp: Trace) -> None:
    """What a module's forward or its part of the backward allocates bears its path."""
    structure = mlp.structure
    for i, (operator, module) in enumerate(zip(structure.operators, structure.modules, strict=True)):
        if operator.startswith(("aten.addmm", "aten.mm", "aten.relu", "aten.threshold_backward")):
            assert module in ("first", "act", "second"), i
    weights = {4 * IN * HIDDEN: "first", 4 * HIDDEN * OUT: "second"}
    gradients = [i for i, kind in enumerate(structure.kinds) if kind == "gradient" and mlp.sizes[i] in weights]
    assert len(gradients) == 4
    assert all(structure.modules[i] == weights[mlp.sizes[i]] for i in gradients)
    assert {structure.modules[i] for i, op in enumerate(structure.operators) if "threshold" in op} == {"act"}


def test_modules_hold_their_parameters(mlp: Trace) -> None:
    """Parameters, gradients and the optimizer's state bear the path of the module that holds the parameter."""
    structure = mlp.structure
    held: dict[tuple[str, str], int] = {}
    for kind, module, size in zip(structure.kinds, structure.modules, mlp.sizes, strict=True):
        if kind in ("parameter", "gradient", "optimizer"):
            held[kind, module] = held.get((kind, module), 0) + size
    first, second = 4 * (IN * HIDDEN + HIDDEN), 4 * (HIDDEN * OUT + OUT)
    assert held == {
        ("parameter", "first"): first,
        ("parameter", "second"): second,
        ("gradient", "first"): 2 * first,
        ("gradient", "second"): 2 * second,
        ("optimizer", "first"): 2 * first,
        ("optimizer", "second"): 2 * second,
    }


def test_shapes(mlp: Trace) -> None:
    """Each tensor's type and dimensions are known; a workspace is no tensor and has none."""
    assert mlp.shapes[:4] == (
        f"float32[{HIDDEN}, {IN}]",
        f"float32[{HIDDEN}]",
        f"float32[{OUT}, {HIDDEN}]",
        f"float32[{OUT}]",
    )
    for kind, shape, size in zip(mlp.structure.kinds, mlp.shapes, mlp.sizes, strict=True):
        assert bool(shape) == (size > 0 and kind != "workspace")


def test_releases_follow_allocations(mlp: Trace) -> None:
    """Every block is allocated once, in order of its number, and released at most once, after that."""
    allocated = [event for event in mlp.structure.order if event >= 0]
    assert allocated == list(range(len(mlp.sizes)))
    released = Counter(~event for event in mlp.structure.order if event < 0)
    assert set(released.values()) <= {1}
    for block in released:
        assert mlp.structure.order.index(block) < mlp.structure.order.index(~block)


def test_workspaces(mlp: Trace, record: Record) -> None:
    """cuBLAS takes one workspace in the forward and one in the backward, for good; on Hopper they are of 32 MiB."""
    spaces = [i for i, kind in enumerate(mlp.structure.kinds) if kind == "workspace"]
    assert [(stage_of(mlp, i), mlp.sizes[i]) for i in spaces] == [
        ((0, "forward"), WORKSPACE),
        ((0, "backward"), WORKSPACE),
    ]
    assert set(spaces) <= set(alive_at(mlp.structure, len(mlp.structure.order) - 1))
    assert of_kind(record(small.mlp, 8, capability=(9, 0)), "workspace") == 2 * (32 << 20)


def test_forward_keeps_its_graph(record: Record) -> None:
    """At the end of a forward the activations are alive with the graph, and no gradient was made."""
    trace = record(small.mlp, 8, mode="forward")
    alive = alive_at(trace.structure, trace.structure.marks[-1].position - 1)
    kept = [(trace.structure.modules[i], trace.sizes[i]) for i in alive if trace.structure.kinds[i] == "activation"]
    assert kept == [("act", 4 * 8 * HIDDEN), ("second", 4 * 8 * OUT)]
    assert not {"gradient", "optimizer"} & set(trace.structure.kinds)


def test_inference_keeps_only_the_output(record: Record) -> None:
    """Without a graph, what no later layer needs is released."""
    trace = record(small.mlp, 8, mode="inference")
    alive = alive_at(trace.structure, trace.structure.marks[-1].position - 1)
    kept = [(trace.structure.modules[i], trace.sizes[i]) for i in alive if trace.structure.kinds[i] == "activation"]
    assert kept == [("second", 4 * 8 * OUT)]


def test_gradient_checkpointing(record: Record) -> None:
    """Recomputed blocks keep their inputs only, and their layers run once more in the backward."""
    kept, recomputed = record(small.not_checkpointed, 64), record(small.checkpointed, 64)

    def activations(trace: Trace) -> int:
        alive = alive_after(trace, 0, "forward")
        return sum(trace.sizes[i] for i in alive if trace.structure.kinds[i] == "activation")

    wide = 4 * 64 * HIDDEN
    # GELU keeps its input, the second linear layer its own: two wide tensors per block.
    assert activations(kept) - activations(recomputed) == 4 * 2 * wide
    made = [stage_of(recomputed, i) for i, op in enumerate(recomputed.structure.operators) if op == "aten.gelu.default"]
    assert Counter(made) == {(step, stage): 4 for step in (0, 1) for stage in ("forward", "backward")}
    again = [
        recomputed.structure.modules[i]
        for i, op in enumerate(recomputed.structure.operators)
        if op == "aten.gelu.default" and stage_of(recomputed, i) == (0, "backward")
    ]
    assert again == [f"blocks.{i}.1" for i in (3, 2, 1, 0)]


def test_accumulation(record: Record) -> None:
    """With two micro-batches the gradients of the first stay, and those of the second are added to them."""
    trace = record(small.mlp, 8, micro_batches=2)
    stages = [(mark.step, mark.stage, mark.micro_batch) for mark in trace.structure.marks]
    assert (0, "backward", 1) in stages
    assert stages.count((0, "optimizer", 0)) == 1
    assert of_kind(trace, "gradient") == 2 * PARAMETERS
    assert of_kind(trace, "temporary") > of_kind(record(small.mlp, 8), "temporary")


def test_dropout_mask_is_bool(record: Record) -> None:
    """On a GPU dropout keeps one byte per element, not a float."""
    trace = record(small.dropped, 8)
    kept = [
        trace.sizes[i]
        for i in alive_after(trace, 0, "forward")
        if "native_dropout" in trace.structure.operators[i] and trace.structure.kinds[i] == "activation"
    ]
    assert 8 * HIDDEN in kept


@pytest.mark.parametrize(
    ("optimizer", "operator", "states"),
    [
        ("adamw", "aten._foreach_sqrt", 2),
        ("adam", "aten._foreach_sqrt", 2),
        ("sgd-momentum", "", 1),
        ("sgd", "", 0),
        ("adamw-fused", "", 2),
    ],
)
def test_optimizers(record: Record, optimizer: str, operator: str, states: int) -> None:
    """Each optimizer holds as many states as it should; AdamW takes its foreach form, or the fused one when asked."""
    trace = record(small.mlp, 8, optimizer=optimizer)
    kept = [n for n, kind in zip(trace.sizes, trace.structure.kinds, strict=True) if kind == "optimizer" and n > 4]
    assert sum(kept) == states * PARAMETERS
    made_by = {op for i, op in enumerate(trace.structure.operators) if stage_of(trace, i) == (1, "optimizer")}
    assert (
        any(op.startswith(operator) for op in made_by) if operator else not any("_foreach_sqrt" in op for op in made_by)
    )


class Wrapped(torch.optim.Optimizer):
    """Keeps two states in one tensor of a subclass, as torchao's optimizers keep codes and scales."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                data = parameter.detach()
                self.state[parameter]["both"] = TwoTensor(torch.zeros_like(data), torch.zeros_like(data))


def test_states_inside_a_tensor(record: Record) -> None:
    """Tensors that an optimizer's state wraps in one of another class are its state."""
    trace = record(lambda: dataclasses.replace(small.mlp(), optimizer=Wrapped), 8)
    assert of_kind(trace, "optimizer") == 2 * PARAMETERS


def test_adafactor_keeps_rows_and_columns(record: Record) -> None:
    """Adafactor's state of a matrix is one row and one column of it."""
    trace = record(small.mlp, 8, optimizer="adafactor")
    assert 0 < of_kind(trace, "optimizer") < PARAMETERS / 20


def test_recurrent_layers_are_told(record: Record) -> None:
    """An LSTM runs in cuDNN's kernels, and the recording says that what they keep is an old version's."""
    told = "cuDNN's reserve space and workspaces of recurrent layers are taken to be those of 2017"
    assert told in record(small.recurrent, 8).unmodelled
    assert told not in record(small.mlp, 8).unmodelled


def test_cudnn_is_told_where_it_would_run(record: Record) -> None:
    """cuDNN's workspaces are left out of convolutions, and a model without any does not mention them."""
    assert "cuDNN workspaces" in record(small.convolution, 8).unmodelled
    assert "cuDNN workspaces" not in record(small.mlp, 8).unmodelled


def test_fourier_transforms_name_what_they_leave_out(record: Record) -> None:
    """What cuFFT takes for itself is said only on a GPU: what it is taken to be is told."""

    class Transformed(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(super().forward(inputs)).real

    trace = record(lambda: Workload(Transformed(8, 8), lambda batch_size, seq_len: torch.zeros(batch_size, 8)), 2)
    assert operands.FFT_ASSUMPTION in trace.unmodelled


@pytest.mark.slow
def test_compiled_steps_need_triton(record: Record) -> None:
    """Without Triton a compiled model is refused, in words that say what to install; it is not recorded eagerly."""

    def build() -> Workload:
        sys.modules["triton"] = None
        workload = small.mlp()
        workload.model.compile()
        return workload

    with pytest.raises(AssertionError, match=r"MissingExtra.*needs triton.*batchfinder\[compile\]"):
        record(build, 8, capability=(8, 0))


def _of_diffusers(name: str) -> Workload:
    import diffusers

    def batch(batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        times = torch.randint(1000, (batch_size,))
        if name == "DiTTransformer2DModel":
            classes = torch.randint(1000, (batch_size,))
            return {"hidden_states": torch.rand(batch_size, 4, 32, 32), "timestep": times, "class_labels": classes}
        text = torch.rand(batch_size, 77, 768)
        return {"sample": torch.rand(batch_size, 4, 32, 32), "timestep": times, "encoder_hidden_states": text}

    few: dict[str, Any] = {"num_layers": 2} if name == "DiTTransformer2DModel" else {"cross_attention_dim": 768}
    return Workload(getattr(diffusers, name)(**few), batch, seq_len_unit="none")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["UNet2DConditionModel", "DiTTransformer2DModel"])
def test_models_of_diffusers_are_recorded(record: Record, name: str) -> None:
    """A UNet and a DiT, built on fake tensors by a factory as the documentation has it."""
    pytest.importorskip("diffusers")
    trace = record(partial(_of_diffusers, name), 2, capability=(8, 0), precision="bf16-mixed")
    assert trace.structure.marks[-1].stage == "end"
    assert any(operator.endswith("_backward.default") for operator in trace.structure.operators)


def _of_images(library: str, name: str) -> Workload:
    def batch(batch_size: int, seq_len: int | None) -> tuple[torch.Tensor]:
        return (torch.rand(batch_size, 3, 224, 224),)

    if library == "timm":
        import timm

        return Workload(timm.create_model(name), batch, seq_len_unit="pixels")
    import torchvision

    return Workload(torchvision.models.get_model(name, weights=None), batch, seq_len_unit="pixels")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("torchvision", "convnext_tiny"),
        ("torchvision", "swin_t"),
        ("timm", "vit_small_patch16_224"),
        ("timm", "levit_128"),
    ],
)
def test_models_of_image_libraries_are_recorded(record: Record, library: str, name: str) -> None:
    """Convolutions, windows and attention tables that are computed as the model is built."""
    pytest.importorskip(library)
    trace = record(partial(_of_images, library, name), 2, capability=(8, 0), precision="bf16-mixed")
    parameters = sum(kind == "parameter" for kind in trace.structure.kinds)
    assert sum(kind == "gradient" for kind in trace.structure.kinds) == 2 * parameters


class Prefetching(nn.Module):
    """Tensors made on another stream, four of which the default one uses; the host waits in another way after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)

    def forward(self, inputs: torch.Tensor) -> Any:
        device: Any = torch.pretend  # type: ignore[attr-defined]
        side, main = device.Stream(), device.current_stream()

        def use(stream: Any = main) -> None:
            with device.stream(side):
                made = torch.empty(3, 1000, device=inputs.device)
            main.wait_stream(side)
            made.record_stream(stream)

        use(side)  # its own, which is no other
        event = main.record_event()
        use()
        event.synchronize()
        event.wait()
        inputs.cos()
        use()
        main.record_event(event)
        event.synchronize()
        use()
        inputs.sum().item()
        event.synchronize()
        use()
        device.synchronize()
        return self.layer(inputs)


def test_when_what_another_stream_has_used_is_free(record: Record) -> None:
    """At the next allocation after the host has waited for later work: an event, a value or the whole device.

    An event of before is none, until it is recorded again; nor does a stream's waiting count. What the host has waited
    for stays done.
    """
    trace = record(lambda: Workload(Prefetching(), small.vectors), 8, steps=1)
    structure = trace.structure
    held = [trace.sizes[event if event >= 0 else ~event] > 0 for event in structure.order]
    waited = [
        (structure.order[position], sum(held[structure.order.index(~block) : position]), structure.streams[block])
        for position, block in structure.free_completed
    ]
    empties = [block for block, name in enumerate(structure.operators) if name == "aten.empty.memory_format"]
    product = structure.operators.index("aten.addmm.default")
    # In the way of the first are the cosine, which comes and goes, and the second; of the third the sum.
    assert waited == [(empties[3], 5, 1), (empties[3], 1, 1), (empties[4], 3, 1), (product, 1, 1)]
