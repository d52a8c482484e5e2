"""One rank of many on the fake GPU: a process group that sends nothing, a mesh, and what each strategy adds to a step.

PyTorch's own sharding code runs, on rank 0. No rank holds more: `torch.chunk` gives the first ranks the larger parts,
and `fully_shard` pads the others to their size. Version 1 of FSDP runs on the rank of which most trains.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from batchfinder.errors import InvalidValue, RecordingFailed
from batchfinder.memory_use.sharding import bucket_sizes
from batchfinder.recording.fake_device import DEVICE_TYPE
from batchfinder.recording.recorder import AllocationRecorder
from batchfinder.training.spec import FSDP1_STRATEGIES, FSDP2_STRATEGIES, STRATEGIES, StepConfig
from batchfinder.training.step import Workload
from batchfinder.training.strategies import fullest_rank, fullest_shard, mesh_shape, shard


def prepare() -> None:
    """Import what shards a model, which takes a second or two."""
    importlib.import_module("torch.distributed.fsdp")
    importlib.import_module("torch.distributed.optim")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")


def make_group(config: StepConfig, rank: int = 0) -> None:
    """Make this process a rank of as many as the step is taken on."""
    import torch.distributed as dist

    # The group of PyTorch's own tests of one rank, which answers every collective at once and moves nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), world_size=config.gpus, rank=rank)


def make_mesh(config: StepConfig, rank: int = 0, device_type: str = DEVICE_TYPE) -> Any:
    """A mesh of as many GPUs as the step is taken on, of a process group of which this process is one rank.

    It is made outside of any fake mode: its table of ranks has to be a real tensor.
    """
    from torch.distributed.device_mesh import init_device_mesh

    make_group(config, rank)
    shape = mesh_shape(
        config.strategy,
        config.gpus,
        config.context_parallel if config.strategy == "fsdp2-cp" else config.tensor_parallel,
    )
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def shards(workload: Workload, config: StepConfig) -> bool:
    """Whether each GPU holds a part of the model alone.

    Raises:
        InvalidValue: nothing says how the model is spread over so many GPUs, or two things do.
    """
    if config.gpus == 1:
        return False
    if workload.parallelize is not None:
        if config.strategy is not None:
            raise InvalidValue(
                "strategy", config.strategy, "none for a workload that brings a `parallelize` of its own"
            )
        return True
    if config.strategy is None:
        expected = f"one of {', '.join(STRATEGIES)} with {config.gpus} GPUs, or a workload with `parallelize`"
        raise InvalidValue("strategy", None, expected)
    return STRATEGIES[config.strategy].shards


def assumptions(config: StepConfig) -> tuple[str, ...]:
    """What a recording on one of several GPUs leaves out or assumes, in words."""
    if config.gpus == 1:
        return ()
    left_out = ["NCCL's own memory is what one communicator was measured to take, and is taken off what is usable"]
    if config.strategy is not None:
        left_out.append("gradients are not clipped")
    if config.strategy in ("tp", "fsdp2-tp"):
        left_out.append("sums over the GPUs are in place; norms and residuals are whole on each GPU")
    elif config.strategy == "fsdp2-cp":
        left_out.append(
            "attention is causal, its work is evened out over the GPUs and keys and values are gathered, as PyTorch "
            f"does; a sequence is padded to a multiple of {2 * config.context_parallel} tokens"
        )
    elif config.strategy == "zero2":
        left_out.append("DeepSpeed's settings are its defaults: buckets of 500 million elements, no overlap")
    elif config.strategy in FSDP1_STRATEGIES:
        left_out.append("embeddings and head are of the root's unit")
        left_out.append(
            "in the backward the block before is gathered ahead (BACKWARD_PRE), which Trainer has to be asked for"
        )
        left_out.append(
            "what another stream has used (record_stream) can be used again when the host has waited for later work; "
            "it is taken to be ahead of the GPU"
        )
    elif config.strategy in FSDP2_STRATEGIES:
        left_out.append("embeddings and head are of the root's unit; accelerate 1.15 gives them units of their own")
    return tuple(left_out)


NOT_BROADCAST = "DDP's broadcast of the weights as it is set up, in pieces of 250 MiB"
"""What the fake device leaves out, where PyTorch's own DDP does not run."""


class BucketViews:
    """The buckets of DDP's reducer with `gradient_as_bucket_view=True`, of which all gradients are views.

    A gradient is copied into its bucket as soon as it is ready and goes (`mark_variable_ready_dense` and
    `finalize_bucket_dense` of https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/reducer.cpp).
    In the first step there is one bucket; `memory_use.sharding` says which there are later.

    Attributes:
        before: those of the first step, once the others are made: NCCL holds them a while (`memory_use.sharding`).
        sums: whether this backward's gradients are summed over the GPUs; else they stay where they are (`no_sync`).
    """

    def __init__(self, model: nn.Module) -> None:
        self.sums = True
        self._ready: dict[nn.Parameter, None] = {}
        self.before: dict[torch.Tensor, torch.Tensor] = {}
        self._views: dict[torch.Tensor, torch.Tensor] = {}
        trained = [each for each in model.parameters() if each.requires_grad]
        self._make([trained])
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._collect)

    def _make(self, buckets: Iterable[Iterable[nn.Parameter]]) -> None:
        for bucket in buckets:
            for dtype, found in groupby(sorted(bucket, key=lambda each: str(each.dtype)), lambda each: each.dtype):
                held = list(found)
                flat = torch.empty(sum(each.numel() for each in held), dtype=dtype, device=held[0].device)
                parts = flat.split([each.numel() for each in held])
                self._views |= {each: part.view_as(each) for each, part in zip(held, parts, strict=True)}

    def rebuild(self) -> None:
        """Make the buckets in the order in which gradients were ready (`_rebuild_buckets`, at the second forward)."""
        self.before = dict(self._views)
        self._views.clear()
        ready, filled = iter(self._ready), bucket_sizes([each.numel() * each.element_size() for each in self._ready])
        for size in filled:
            bucket: list[nn.Parameter] = []
            while sum(each.numel() * each.element_size() for each in bucket) < size:
                bucket.append(next(ready))
            self._make([bucket])

    @torch.no_grad()
    def _collect(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._ready[parameter] = None
        if self.sums and parameter.grad is not None and parameter.grad is not self._views[parameter]:
            self._views[parameter].copy_(parameter.grad)
            parameter.grad = self._views[parameter]


class _Unseen:
    """A context that may be entered any number of times, in which a recorder sees nothing."""

    def __init__(self, recording: AllocationRecorder) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        self._recording.paused += 1

    def __exit__(self, *_: object) -> None:
        self._recording.paused -= 1


def parallelize(workload: Workload, config: StepConfig, mesh: Any, recording: AllocationRecorder) -> nn.Module:
    """Spread a model over a mesh while that is recorded; returns what is trained, the model or what it is wrapped in.

    Its parameters are on the fake device already, and unseen by the recorder: `fully_shard` moves a unit to the GPU as
    it shards it, and so each is seen when it is first touched, and goes when its unit has been sharded.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    recording.sharded = DTensor
    # What DTensor enters around its computing of shapes on whole fake tensors (torch 2.13, _sharding_prop.py).
    setattr(ShardingPropagator, "_fake_mode_lock", _Unseen(recording))  # noqa: B010
    _give_addresses()
    model = workload.model
    if workload.parallelize is not None:
        model = _parallelized(workload, mesh)
    else:
        assert config.strategy is not None
        model = shard(model, config.strategy, mesh, config.precision)
    recording.note([*model.parameters(), *model.buffers()], "module.to")
    return model


def _parallelized(workload: Workload, mesh: Any) -> nn.Module:
    """A model spread over a mesh by the workload's own calls: itself, or what they return in its place."""
    assert workload.parallelize is not None
    made = workload.parallelize(workload.model, mesh)
    return made if isinstance(made, nn.Module) else workload.model


def spread(workload: Workload, config: StepConfig) -> nn.Module:
    """Put a model of real CPU tensors on a card as one of several GPUs has it, by PyTorch's own DDP or sharding.

    Returns:
        What is trained: the model, or what it is wrapped in.

    Raises:
        InvalidValue: nothing says how the model is spread over so many GPUs, or two things do.
        RecordingFailed: the workload's own sharding leaves parameters in the host's memory.
    """
    model, strategy, sharded = workload.model, config.strategy, shards(workload, config)
    if workload.parallelize is not None:
        from torch.distributed.tensor import DTensor

        model = _parallelized(workload, make_mesh(config, device_type="cuda"))
        for each in (*model.parameters(), *model.buffers()):
            if not isinstance(each, DTensor):
                each.data = each.data.to("cuda")
            elif each.device.type == "cpu":
                raise RecordingFailed(
                    "parameters in the host's memory (CPUOffloadPolicy): their optimizer would compute on this "
                    "machine's CPU, and PyTorch's CUDA build does not record that. Ask for --recorder fake-device."
                )
        return model
    assert strategy is not None
    if sharded:
        mesh = make_mesh(config, fullest_shard(model, config.gpus) if strategy in FSDP1_STRATEGIES else 0, "cuda")
        return shard(model, strategy, mesh, config.precision, lambda module: module.to("cuda"))
    model.to("cuda")
    make_group(config, fullest_rank(model, config.gpus) if strategy == "zero1" else 0)
    by_views = strategy == "ddp-bucket-view"
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=by_views)
    # What the group above answers has no tensor. How long NCCL holds a backward's buckets: `memory_use.sharding`.
    before: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []

    def summed(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            before[:] = sent
            sent.clear()
        sent.append(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, lambda _, bucket: summed(bucket))
    return model


def without_ddp(model: nn.Module) -> nn.Module:
    """The model that DDP is around, if it is."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _give_addresses() -> None:
    """Let version 1 of FSDP tell fake tensors' storages apart.

    It compares addresses, which all are 0 (`_same_storage` of
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_flat_param.py and `_catch_all_reshard` of
    `_runtime_utils.py` beside it).
    """
    address = torch.UntypedStorage.data_ptr

    def of_storage(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":  # what fake tensors are made of
            return address(storage)
        return storage._cdata if storage.nbytes() else 0

    def of_tensor(tensor: torch.Tensor) -> int:
        start = of_storage(tensor.untyped_storage())
        return start and start + int(tensor.storage_offset()) * tensor.element_size()

    torch.UntypedStorage.data_ptr = of_storage  # type: ignore[assignment, method-assign]
    FakeTensor.data_ptr = of_tensor  # type: ignore[assignment, method-assign]


def flat_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What version 1 of FSDP has of each unit, by the unit's path in the model that was wrapped."""
    for name, module in model.named_modules():
        flat = getattr(module, "_flat_param", None) if hasattr(module, "_fsdp_wrapped_module") else None
        if flat is not None:
            yield name_in_model(name), flat


def name_in_model(name: str) -> str:
    """A dotted path without what version 1 of FSDP puts into it for each module that it wraps."""
    return name.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", "")
