"""One training step of a workload on the pretend GPU, as a trace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfinder.simulator.trace import Trace
from batchfinder.step.step import Step, StepSettings
from batchfinder.step.workload import Workload
from batchfinder.tracing import attention, autocast, packed, pretend, recurrent
from batchfinder.tracing.modules import ModuleTracker
from batchfinder.tracing.recording import Recording

_CUDNN = ("aten.convolution", "aten._scaled_dot_product_cudnn_attention", "aten.cudnn_batch_norm")


def record_step(
    workload: Workload,
    settings: StepSettings,
    capability: tuple[int, int],
    batch_size: int,
    seq_len: int | None,
    mode: FakeTensorMode | None = None,
    flash: bool = False,
    on_operator: Callable[[str], None] = lambda name: None,
) -> Trace:
    """Run the step on the pretend GPU and write down each allocation.

    The process becomes one whose accelerator is the pretend GPU, for good: call this in a child process. An exception
    inside the backward ends the process.

    Args:
        workload: what is trained; its model is left on the pretend GPU.
        settings: how the step is taken.
        capability: the simulated GPU's compute capability, which decides on attention kernels and workspaces.
        batch_size: samples in a micro-batch.
        seq_len: tokens per sample; None for data of one fixed shape.
        mode: the fake mode that the workload's model was made in; None for a model of real tensors.
        flash: whether attention must run as the flash kernel.
        on_operator: called with each operator's name before it runs.

    Returns:
        The trace, sizes in bytes as they were asked for.
    """
    device = pretend.register()
    autocast.register()
    attention.register(capability, flash)
    recurrent.register()
    packed.register()
    pretend.hide_from_transformers()
    mode = mode or pretend.PretendMode(allow_non_fake_inputs=True)
    tracker = ModuleTracker(workload.model)
    recording = Recording(capability, tracker.current, on_operator)
    step = Step(
        workload,
        settings,
        device,
        lambda tensor, dtype: pretend.pretend_copy(tensor, device, mode, dtype),
    )
    first = 0

    def on_stage(number: int, stage: str, micro_batch: int) -> None:
        nonlocal first
        if stage == "forward":
            recording.label_alive(first, "input")
        elif stage == "backward" or (stage == "end" and settings.mode != "train"):
            recording.label_alive(first, "activation")
        elif stage == "optimizer":
            for name, parameter in workload.model.named_parameters():
                recording.label([parameter.grad], "gradient", _holder(name))
        if stage in ("batch", "forward"):
            first = len(recording.sizes)
        recording.mark(number, stage, micro_batch)

    # With CPU tensors in the graph, the engine's threads would race inside the fake mode.
    with mode, torch.autograd.set_multithreading_enabled(False), tracker.tracking(), recording:
        recording.mark(-1, "model")
        pretend.move_module(workload.model, device, mode, step.precision.weights, recurrent.flatten_weights)
        step.run(batch_size, seq_len, on_stage)
        for name, buffer in workload.model.named_buffers():
            recording.label([buffer], "buffer", _holder(name))
        holders: dict[torch.Tensor, str] = {}
        for name, parameter in workload.model.named_parameters():
            holders[parameter] = _holder(name)
            recording.label([parameter], "parameter", holders[parameter])
        for stepped, state in step.optimizer.state.items() if step.optimizer is not None else ():
            values = [value for value in state.values() if isinstance(value, torch.Tensor)]
            recording.label(values, "optimizer", holders.get(stepped, ""))
        structure, sizes, shapes = recording.structure(), tuple(recording.sizes), recording.shapes()
    cudnn = ("cuDNN workspaces",) if any(name.startswith(_CUDNN) for name in structure.operators) else ()
    if any(name.startswith("aten._cudnn_rnn") for name in structure.operators):
        cudnn = (*cudnn, "cuDNN's reserve space and workspaces of recurrent layers are taken to be those of 2017")
    unmodelled = (*cudnn, "kernels' small scratch tensors", *recording.unmodelled)
    return Trace(batch_size, seq_len, structure, sizes, unmodelled, shapes)


def _holder(name: str) -> str:
    """The path of the module that holds a parameter or a buffer."""
    return name.rpartition(".")[0]
