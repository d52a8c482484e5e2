"""How a model is spread over several GPUs by name: which modules are sharded together, over which mesh, in which types.

`fsdp2` is `torch.distributed.fsdp.fully_shard`, https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html:
each block of the model is a unit, whose parameters are gathered for its forward and again for its backward, and what
is in no block is the root's unit, gathered from the forward to the end of the backward. So accelerate's FSDP does it,
where blocks are the classes of a transformers model's `_no_split_modules` (`transformer_auto_wrap_policy`); accelerate
1.15 gives embeddings and the output head units of their own besides
(https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/fsdp_utils.py, `fsdp2_prepare_model`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from batchfinder.training.spec import GPUS_PER_NODE, STRATEGIES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


def mesh_shape(strategy: str | None, gpus: int) -> dict[str, int]:
    """The sizes of the mesh's dimensions by their names, the outermost first.

    With `hsdp` parameters are sharded over the GPUs of a node and gradients are summed over the nodes besides.
    """
    if strategy == "hsdp":
        return {"replicate": gpus // GPUS_PER_NODE, "shard": GPUS_PER_NODE}
    return {"shard": gpus}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are units of their own, inner ones before those they are in.

    Of a transformers model those that it names in `_no_split_modules`; of others the elements of each outermost
    `nn.ModuleList` or `nn.Sequential` of more than one module with parameters.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in named and module is not model]
    if not found:
        inside: set[nn.Module] = set()
        for module in model.modules():
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and module not in inside and module is not model:
                blocks = [block for block in module if next(block.parameters(), None) is not None]
                found += blocks if len(blocks) > 1 else []
                inside |= set(module.modules()) if len(blocks) > 1 else set()
    return found[::-1]


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """In which types parameters are gathered and gradients summed; shards and the optimizer's state keep theirs.

    As accelerate does for mixed precision, all in 16 bits, and with autocast besides
    (https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py,
    `FullyShardedDataParallelPlugin.set_mixed_precision`).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if precision != "bf16-mixed":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def shard(model: nn.Module, strategy: str, mesh: DeviceMesh, precision: str) -> None:
    """Shard a model over a mesh, in place.

    Args:
        strategy: one of `spec.STRATEGIES` that shard parameters.
        mesh: of the dimensions that `mesh_shape` says.
        precision: one of `spec.PRECISION_NAMES`.
    """
    from torch.distributed.fsdp import fully_shard

    # With `fsdp2-shard-grad-op` (ZeRO-2) what is gathered for the forward stays until its backward is done.
    reshard = STRATEGIES[strategy].reshards
    policy = mixed_precision(precision)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False, mp_policy=policy)


def sum_gradients(model: nn.Module, now: bool) -> None:
    """Have the next backward of a sharded model sum gradients over the GPUs and shard them, or keep them whole.

    accelerate keeps them whole until the last micro-batch of a step (`Accelerator.no_sync`); what a user's own calls
    have sharded is left as it is.
    """
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if callable(set_sync):
        set_sync(now)
