"""One rank of many on the fake GPU: a process group that sends nothing, a mesh, and what each strategy adds to a step.

PyTorch's own sharding code runs, on rank 0. No rank holds more: `torch.chunk` gives the first ranks the larger parts,
and `fully_shard` pads the others to their size.
"""

from __future__ import annotations

import importlib
from typing import Any

from batchfinder.errors import InvalidValue
from batchfinder.recording.fake_device import DEVICE_TYPE
from batchfinder.recording.recorder import AllocationRecorder
from batchfinder.training.spec import STRATEGIES, StepConfig
from batchfinder.training.step import Workload
from batchfinder.training.strategies import mesh_shape, shard


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


def make_mesh(config: StepConfig) -> Any:
    """A mesh of as many GPUs as the step is taken on, of a process group of which this process is rank 0.

    It is made outside of any fake mode: its table of ranks has to be a real tensor.
    """
    from torch.distributed.device_mesh import init_device_mesh

    make_group(config)
    shape = mesh_shape(config.strategy, config.gpus)
    return init_device_mesh(DEVICE_TYPE, tuple(shape.values()), mesh_dim_names=tuple(shape))


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
    """What a recording on one of several GPUs leaves out, in words.

    NCCL's buffers: 4 MiB for each channel and peer by default,
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS).
    """
    if config.gpus == 1:
        return ()
    left_out = ["NCCL's own memory, which is outside the allocator: 4 MiB for each channel and peer, and more"]
    if config.strategy is not None:
        left_out.append("gradients are not clipped")
    if config.strategy in ("ddp", "zero1"):
        left_out.append("DDP's broadcast of the weights as it is set up, in pieces of 250 MiB")
    elif config.strategy == "tp":
        left_out.append("sums over the GPUs are in place; norms and residuals are whole on each GPU")
    elif config.strategy == "zero2":
        left_out.append("DeepSpeed's settings are its defaults: buckets of 500 million elements, no overlap")
    elif config.strategy is not None:
        left_out.append("embeddings and head are of the root's unit; accelerate 1.15 gives them units of their own")
    return tuple(left_out)


class _Unseen:
    """A context that may be entered any number of times, in which a recorder sees nothing."""

    def __init__(self, recording: AllocationRecorder) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        self._recording.paused += 1

    def __exit__(self, *_: object) -> None:
        self._recording.paused -= 1


def parallelize(workload: Workload, config: StepConfig, mesh: Any, recording: AllocationRecorder) -> None:
    """Spread a model over a mesh while that is recorded.

    Its parameters are on the fake device already, and unseen by the recorder: `fully_shard` moves a unit to the GPU as
    it shards it, and so each is seen when it is first touched, and goes when its unit has been sharded.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    recording.sharded = DTensor
    # What DTensor enters around its computing of shapes on whole fake tensors (torch 2.13, _sharding_prop.py).
    setattr(ShardingPropagator, "_fake_mode_lock", _Unseen(recording))  # noqa: B010
    model = workload.model
    if workload.parallelize is not None:
        workload.parallelize(model, mesh)
    else:
        assert config.strategy is not None
        shard(model, config.strategy, mesh, config.precision)
    recording.note([*model.parameters(), *model.buffers()], "module.to")
