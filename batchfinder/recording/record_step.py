"""Records one training step of a workload on the fake GPU, as a trace of allocations and the modules they are from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfinder.devices import all_gpus, device_for
from batchfinder.errors import BatchFinderError, RecordingFailed
from batchfinder.memory_use.sharding import buckets_of
from batchfinder.models import quantization
from batchfinder.models.build import allow_fake_weights
from batchfinder.recording import (
    autocast,
    distributed,
    fake_device,
    fake_values,
    operands,
    rnn,
    sdpa,
    sparse,
    user_kernels,
)
from batchfinder.recording.labels import StepLabels
from batchfinder.recording.modules import ModuleTracker, compiled_modules, graphs_compiled
from batchfinder.recording.recorder import AllocationRecorder
from batchfinder.simulator.trace import Trace, add_blocks
from batchfinder.training.optimizers import OPTIMIZERS
from batchfinder.training.spec import DDP_STRATEGIES, FSDP1_STRATEGIES, StepConfig
from batchfinder.training.step import Step, Workload
from batchfinder.training.strategies import BUCKET_ELEMENTS, PartitionedOptimizer, fullest_rank, fullest_shard

_OLDEST_TORCH = "2.11"
if torch.__version__ < _OLDEST_TORCH:  # it compares as versions do
    raise RecordingFailed(f"a simulated step needs PyTorch {_OLDEST_TORCH} or later; this is {torch.__version__}")

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
        The trace, sizes in bytes as they were asked for; what reductions allocate is still to be added, by `Trace.on`.

    Raises:
        MissingExtra: the model is compiled, and Triton is not installed.
        RecordingFailed: the model is compiled, and cannot be compiled for such a GPU.
    """
    device = fake_device.register()
    autocast.register()
    sdpa.register(capability, config.flash)
    rnn.register()
    sparse.register()
    fake_values.register()
    user_kernels.register(capability)
    fake_device.hide_from_transformers()
    mode = mode or fake_device.FakeDeviceMode(allow_non_fake_inputs=True)
    with mode:
        quantization.replace_bitsandbytes(workload.model)
    compiled = compiled_modules(workload.model)
    layout = operands.register(bool(compiled), capability)
    assumptions = compile_for_card(capability, device, at_once=bool(compiled))
    tracker = ModuleTracker(workload.model)
    others = {device_for(gpu).compute_capability for gpu in all_gpus()} - {capability}
    sdpa.same_kernels.clear()
    sdpa.same_kernels.update(others)
    recording = AllocationRecorder(capability, tracker.current, on_operator, workload.sums_in_place, others)

    def move(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        copy = fake_device.fake_copy(tensor, device, dtype)
        if not isinstance(tensor, torch.nn.Parameter):  # what is computed with weights has no values here
            recording.values.give(copy, tensor)
        return copy

    step = Step(workload, config, device, move)
    labels = StepLabels(step, recording)
    buckets: distributed.BucketViews | None = None

    def on_stage(number: int, stage: str, micro_batch: int) -> None:
        labels.begin(number, stage, micro_batch)
        if buckets is not None and stage == "forward":
            buckets.sums = micro_batch == config.micro_batches - 1
            if (number, micro_batch) == (1, 0):
                buckets.rebuild()
                labels.first = recording.blocks
        elif buckets is not None and stage == "optimizer" and number > 0:
            buckets.before.clear()

    def on_moved(module: nn.Module) -> None:
        rnn.flatten_weights(module)
        quantization.make_statistics(module, device)

    # With CPU tensors in the graph, the engine's threads would race inside the fake mode.
    one_thread = torch.autograd.set_multithreading_enabled(False)
    sharded = distributed.shards(workload, config)
    flat = config.strategy in FSDP1_STRATEGIES
    rank = fullest_shard(workload.model, config.gpus) if flat else 0
    mesh = distributed.make_mesh(config, rank) if sharded else None
    if config.strategy == "zero1":
        distributed.make_group(config, fullest_rank(workload.model, config.gpus))
    if sharded:
        with mode, allow_fake_weights():
            fake_device.move_module(workload.model, move, step.weights_dtype)
    with mode, allow_fake_weights(), one_thread, tracker.tracking(), recording, recording.watching_storages():
        recording.mark(-1, "model")
        if sharded:
            workload = step.workload = replace(
                workload, model=distributed.parallelize(workload, config, mesh, recording)
            )
        else:
            fake_device.move_module(workload.model, move, step.weights_dtype, on_moved)
        if config.strategy == "ddp-bucket-view":
            buckets = distributed.BucketViews(workload.model)
        try:
            step.run(batch_size, seq_len, on_stage)
        except Exception as error:  # Dynamo's, around what a compiler has raised
            raised = getattr(error, "inner_exception", None)
            if isinstance(raised, BatchFinderError):
                raise raised from None
            if raised is not None and type(error).__module__ in ("torch._dynamo.exc", "torch._inductor.exc"):
                raise RecordingFailed(
                    "torch.compile: a graph of this step could not be compiled for the simulated GPU: "
                    f"{type(raised).__name__}: {raised}\nMeasure on a real GPU, or ask for the model not compiled."
                ) from error
            raise
        labels.end()
        if isinstance(step.optimizer, PartitionedOptimizer):
            bucket = BUCKET_ELEMENTS * step.optimizer.flat.element_size()
            for block, size in enumerate(recording.sizes):
                if size == bucket and recording.kinds[block] in ("temporary", "activation"):
                    recording.kinds[block] = "communication"
        structure, sizes, shapes = recording.structure(), tuple(recording.sizes), recording.shapes()
    if config.strategy == "fsdp2-cp" and not any("_scaled_dot_product_" in name for name in structure.operators):
        raise RecordingFailed(sdpa.NOT_FUSED)
    cudnn = ("cuDNN workspaces",) if any(name.startswith(_CUDNN) for name in structure.operators) else ()
    if layout and any(name.startswith("aten.convolution") for name in structure.operators):
        cudnn = (*cudnn, layout)
    if any(name.startswith("aten._cudnn_rnn") for name in structure.operators):
        cudnn = (*cudnn, "cuDNN's reserve space and workspaces of recurrent layers are taken to be those of 2017")
    fft = (operands.FFT_ASSUMPTION,) if any(name.startswith("aten._fft_") for name in structure.operators) else ()
    coalesced = (sparse.COALESCED,) if "aten._coalesce.default" in structure.operators else ()
    graphs = graphs_compiled()
    if compiled and not graphs:
        raise RecordingFailed(
            "torch.compile has compiled nothing of this model: Dynamo passed over all of it. It does so where "
            "TORCH_COMPILE_DISABLE is set, for modules of PyTorch's own compiled by their method, and for bf16 "
            "before compute capability 8.0. A real GPU would run it eagerly as well: ask for the model not compiled."
        )
    named = config.mode == "train" and workload.optimizer is None
    assumed = [each for each in [OPTIMIZERS[config.optimizer].assumed if named else ""] if each]
    unmodelled = (
        *workload.assumptions,
        *cudnn,
        *fft,
        *coalesced,
        *assumed,
        *quantization.assumptions(workload.model),
        *distributed.assumptions(config),
        *([distributed.NOT_BROADCAST] if config.strategy in DDP_STRATEGIES else []),
        "kernels' small scratch tensors",
        *assumptions,
        *recording.values.assumed,
        *recording.unmodelled,
        *user_kernels.unmodelled(),
    )
    flops = recording.flops // (config.steps * config.micro_batches)
    alike = {
        other: tuple((block, size) for block, size in sorted(different.items()) if size != sizes[block])
        for other, different in recording.alike.items()
        if other in sdpa.same_kernels and not compiled and not graphs and not user_kernels.depends_on_card()
    }
    reductions = tuple(recording.reductions)
    trace = Trace(batch_size, seq_len, structure, sizes, unmodelled, shapes, graphs > 0, flops, alike, reductions)
    # DDP's reducer reads what tensors hold, and so does not run here: its buckets are added.
    return add_blocks(trace, buckets_of(trace)) if config.strategy in ("ddp", "zero1") else trace


def compile_for_card(capability: tuple[int, int], device: torch.device, at_once: bool) -> dict[str, None]:
    """Have torch.compile compile for a card of this compute capability; returns what is assumed, as it comes up.

    Inductor takes seconds to import: without `at_once` it is when the first graph is to be compiled.
    """
    assumptions: dict[str, None] = {}

    def compile_graph(wrapper: Any, model: Any, inputs: Any, *, config_patches: Any = None) -> Any:
        from batchfinder.recording import inductor

        compiler = inductor.register(capability, device, assumptions)
        return compiler.compile(model, inputs, {**wrapper.config, **(config_patches or {})})

    # torch.compile's backend "inductor", in torch/__init__.py of 2.13.0.
    torch._TorchCompileInductorWrapper.__call__ = compile_graph  # type: ignore[method-assign]
    if at_once:
        from batchfinder.recording import inductor

        inductor.register(capability, device, assumptions)
    return assumptions
