"""Records one training step of a workload on the fake GPU, as a trace of allocations and the modules they are from."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as nn_module

from batchfinder.recording import autocast, fake_device, fake_values, rnn, sdpa
from batchfinder.recording.recorder import AllocationRecorder
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Step, Workload

_CUDNN = ("aten.convolution", "aten._scaled_dot_product_cudnn_attention", "aten.cudnn_batch_norm")


def record_step(
    workload: Workload,
    config: StepConfig,
    capability: tuple[int, int],
    batch_size: int,
    seq_len: int | None,
    mode: FakeTensorMode | None = None,
    on_operator: Callable[[str], None] = lambda name: None,
) -> Trace:
    """Run the step on the fake GPU and record each allocation.

    The process becomes one whose accelerator is the fake GPU, for good: call this in a child process. An exception
    inside the backward ends the process.

    Args:
        workload: what is trained; its model is left on the fake GPU.
        config: how the step is taken.
        capability: compute capability, which decides on attention kernels and workspaces.
        batch_size: of a micro-batch, in samples.
        seq_len: tokens per sample; None for data of one fixed shape.
        mode: the fake mode that the workload's model was made in; None for a model of real tensors.
        on_operator: called with each operator's name before it runs.

    Returns:
        The trace, sizes in bytes as they were asked for.
    """
    device = fake_device.register()
    autocast.register()
    sdpa.register(capability, config.flash)
    rnn.register()
    fake_values.register()
    fake_device.hide_from_transformers()
    mode = mode or fake_device.FakeDeviceMode(allow_non_fake_inputs=True)
    tracker = ModuleTracker(workload.model)
    recording = AllocationRecorder(capability, tracker.current, on_operator)

    def move(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        copy = fake_device.fake_copy(tensor, device, dtype)
        recording.values.give(copy, tensor)
        return copy

    step = Step(workload, config, device, move)
    first = 0

    def on_stage(number: int, stage: str, micro_batch: int) -> None:
        nonlocal first
        if stage == "forward":
            recording.label_alive(first, "input")
        elif stage == "backward" or (stage == "end" and config.mode != "train"):
            recording.label_alive(first, "activation")
        elif stage == "optimizer":
            for name, parameter in workload.model.named_parameters():
                recording.label([parameter.grad], "gradient", name.rpartition(".")[0])
        if stage in ("batch", "forward"):
            first = len(recording.sizes)
        recording.mark(number, stage, micro_batch)

    # With CPU tensors in the graph, the engine's threads would race inside the fake mode.
    with mode, torch.autograd.set_multithreading_enabled(False), tracker.tracking(), recording:
        recording.mark(-1, "model")
        fake_device.move_module(workload.model, move, step.precision.weights, rnn.flatten_weights)
        step.run(batch_size, seq_len, on_stage)
        for name, buffer in workload.model.named_buffers():
            recording.label([buffer], "buffer", name.rpartition(".")[0])
        holders: dict[torch.Tensor, str] = {}
        for name, parameter in workload.model.named_parameters():
            holders[parameter] = name.rpartition(".")[0]
            recording.label([parameter], "parameter", holders[parameter])
        for stepped, state in step.optimizer.state.items() if step.optimizer is not None else ():
            values = [value for value in state.values() if isinstance(value, torch.Tensor)]
            recording.label(values, "optimizer", holders.get(stepped, ""))
        structure, sizes, shapes = recording.structure(), tuple(recording.sizes), recording.shapes()
    cudnn = ("cuDNN workspaces",) if any(name.startswith(_CUDNN) for name in structure.operators) else ()
    if any(name.startswith("aten._cudnn_rnn") for name in structure.operators):
        cudnn = (*cudnn, "cuDNN's reserve space and workspaces of recurrent layers are taken to be those of 2017")
    # Dynamo passes over every frame while a dispatch mode is active, without a word.
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in workload.model.modules()
    )
    eager = ("torch.compile: the step is recorded as it runs eagerly, and a compiled one takes less or more",)
    as_eager = eager if compiled else ()
    assumed = (*recording.values.assumed, *recording.unmodelled)
    unmodelled = (*workload.assumptions, *as_eager, *cudnn, "kernels' small scratch tensors", *assumed)
    return Trace(batch_size, seq_len, structure, sizes, unmodelled, shapes)


class ModuleTracker:
    """Knows, while it is entered, the dotted path of the module at work.

    In the forward it keeps a stack by global hooks. In the backward it asks the autograd node that is running for its
    sequence number: nodes are numbered as the forward makes them, so the number says inside which module's forward the
    node was made. Unlike `torch.utils.module_tracker` this adds no node to the graph, which would change the memory.

    Args:
        model: the root; its own path is empty.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Install the hooks, and remove them at the end."""

        def start_range() -> None:
            # From the next autograd node on, nodes belong to the module on top of the stack.
            self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._owners.append(self._stack[-1] if self._stack else "")

        def push(module: nn.Module, args: Any) -> None:
            self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
            start_range()

        def pop(module: nn.Module, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()
                start_range()

        handles = (
            nn_module.register_module_forward_pre_hook(push),
            nn_module.register_module_forward_hook(pop, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def current(self) -> str:
        """The dotted path of the module at work; empty outside the model."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[place] if place >= 0 else ""
