"""How a model is spread over several GPUs by name: which modules are sharded together, over which mesh, in which types.

`fsdp2` is `torch.distributed.fsdp.fully_shard`, https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html:
each block of the model is a unit, whose parameters are gathered for its forward and again for its backward, and what
is in no block is the root's unit, gathered from the forward to the end of the backward. So accelerate's FSDP does it,
where blocks are the classes of a transformers model's `_no_split_modules` (`transformer_auto_wrap_policy`); accelerate
1.15 gives embeddings and the output head units of their own besides
(https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/fsdp_utils.py, `fsdp2_prepare_model`).

`fsdp` is `torch.distributed.fsdp.FullyShardedDataParallel`, version 1, https://docs.pytorch.org/docs/2.13/fsdp.html:
the same units, of which each is one flat parameter. It is wrapped as accelerate does with `fsdp_version: 1`, and as
Lightning's FSDPStrategy does.

`zero1` is DDP with PyTorch's `ZeroRedundancyOptimizer`, which deals out whole parameters. `zero2` does what DeepSpeed's
stage 2 does with its defaults, as accelerate takes them, and without its C++:
https://github.com/deepspeedai/DeepSpeed/blob/v0.19.5/deepspeed/runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from batchfinder.errors import InvalidValue
from batchfinder.training.spec import FSDP1_STRATEGIES, GPUS_PER_NODE, STRATEGIES, StepConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


def mesh_shape(strategy: str | None, gpus: int, split: int = GPUS_PER_NODE) -> dict[str, int]:
    """The sizes of the mesh's dimensions by their names, the outermost first.

    With `hsdp` parameters are sharded over the GPUs of a node and gradients are summed over the nodes besides. With
    `fsdp2-tp` layers are split over `split` GPUs, and what each has of them is sharded over the others. With `fsdp2-cp`
    sequences are split over `split` GPUs, and parameters are sharded over all.
    """
    if strategy in ("fsdp2-tp", "fsdp2-cp"):
        return {"shard": gpus // split, "tensor" if strategy == "fsdp2-tp" else "context": split}
    if strategy == "hsdp":
        return {"replicate": gpus // GPUS_PER_NODE, "shard": GPUS_PER_NODE}
    return {"shard": gpus}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are units of their own, inner ones before those they are in.

    Of a transformers model those that it names in `_no_split_modules`; of others the elements of each outermost
    `nn.ModuleList` or `nn.Sequential` of more than one module with parameters. What shares a parameter with a module
    outside of it, as BERT's embeddings do with its head, is not one: FSDP refuses that.
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
    holders = _holders(model)
    return [block for block in found[::-1] if all(holders[each] == held for each, held in _holders(block).items())]


def _holders(model: nn.Module) -> Counter[nn.Parameter]:
    """For each parameter how many modules have it as their own."""
    return Counter(each for module in model.modules() for each in module.parameters(recurse=False))


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


def shard(
    model: nn.Module,
    strategy: str,
    mesh: DeviceMesh,
    precision: str,
    before: Callable[[nn.Module], object] = lambda module: None,
) -> nn.Module:
    """Shard a model over a mesh, in place.

    Args:
        strategy: one of `spec.STRATEGIES` that shard parameters.
        mesh: of the dimensions that `mesh_shape` says.
        precision: one of `spec.PRECISION_NAMES`.
        before: called with each module that `tp` splits; FSDP moves a unit to the GPU itself.

    Returns:
        What is trained: the model, or with version 1 of FSDP the module that it is wrapped in.
    """
    from torch.distributed.fsdp import fully_shard

    if strategy in FSDP1_STRATEGIES:
        return wrap(model, mesh, precision, STRATEGIES[strategy].reshards)
    if strategy == "tp":
        split_layers(model, mesh, "gpus", before)
        return model
    if strategy == "fsdp2-tp":
        split_layers(model, mesh["tensor"], "tensor_parallel", before)
        mesh = mesh["shard"]
    if strategy == "fsdp2-cp":
        split_attention(mesh["context"])
        mesh = mesh._flatten("all")
    # With `fsdp2-shard-grad-op` (ZeRO-2) what is gathered for the forward stays until its backward is done.
    reshard = STRATEGIES[strategy].reshards
    policy = mixed_precision(precision)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False, mp_policy=policy)
    return model


def wrap(model: nn.Module, mesh: DeviceMesh, precision: str, reshard: bool) -> nn.Module:
    """Shard a model by version 1 of FSDP, block by block.

    `use_orig_params`, prefetching in the backward (`BACKWARD_PRE`) and `limit_all_gathers` are what `accelerate config`
    proposes, and Lightning's FSDPStrategy has; the types are those of `mixed_precision` above, buffers included:
    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py
    (`FullyShardedDataParallelPlugin`).

    Args:
        reshard: whether what was gathered for a forward is given back until the backward.

    Raises:
        InvalidValue: version 1 cannot do it, as where parameters of several types would be one flat parameter.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    half = torch.bfloat16 if precision == "bf16-mixed" else None
    device = next(model.parameters()).device
    units = set(flat_units_of(model))
    try:
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            mixed_precision=MixedPrecision(half, half, half),
            use_orig_params=True,
            device_id=torch.accelerator.current_device_index() if device.type == "cpu" else device,
        )
    except ValueError as error:
        expected = f"another for this model, which version 1 of FSDP cannot wrap: {str(error).rstrip('.')}"
        raise InvalidValue("strategy", "fsdp" if reshard else "fsdp-shard-grad-op", expected) from error


def flat_units_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are units of version 1 of FSDP, but for the model itself, inner ones before outer ones.

    Of a model with peft's adapters each layer that trains and has no other in it is one besides the blocks, as
    transformers' Trainer has it by peft's `fsdp_auto_wrap_policy`,
    https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/other.py.
    """
    blocks = blocks_of(model)
    if not hasattr(model, "peft_config"):
        return blocks
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    return [leaf for leaf in leaves if getattr(getattr(leaf, "weight", None), "requires_grad", False)] + blocks


def fullest_shard(model: nn.Module, gpus: int) -> int:
    """The rank that version 1 of FSDP gives most elements that train.

    A unit's parameters stand one after the other, frozen ones among them, and each rank has a run of them.
    """
    held, seen = [0] * gpus, set[nn.Parameter]()
    for unit in [*flat_units_of(model), model]:
        own = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(own)
        run = max(1, -(-sum(parameter.numel() for parameter in own) // gpus))
        start = 0
        for parameter in own:
            end = start + parameter.numel()
            for rank in range(start // run, -(-end // run)) if parameter.requires_grad else ():
                held[rank] += min(end, (rank + 1) * run) - max(start, rank * run)
            start = end
    return held.index(max(held))


def split_layers(
    model: nn.Module, mesh: DeviceMesh, option: str, before: Callable[[nn.Module], object] = lambda module: None
) -> None:
    """Split a transformers model's layers over a mesh, in place, by the plan that it has for its own `tp_plan="auto"`.

    A style that leaves a module whole is passed over.

    Args:
        option: what the mesh's size was asked for with.
        before: called with each module that is split.

    Raises:
        InvalidValue: the model has no plan, or one with a style that is not known here; or its heads cannot be dealt
            out to so many GPUs.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    styles: dict[str, ParallelStyle | None] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": None,
        "replicate": None,
    }
    unknown = sorted(set(plan.values()) - set(styles))
    if not plan or unknown:
        why = f"its plan has {', '.join(unknown)}" if unknown else "it has no plan (`_tp_plan`)"
        named = "tp" if option == "gpus" else "fsdp2-tp"
        raise InvalidValue("strategy", named, f"another for this model: {why}; or a workload with `parallelize`")
    config: Any = model.config
    config, gpus = config.get_text_config(), mesh.size()
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads % gpus or groups % gpus:
        what = f"{heads} attention heads" + (f" and {groups} heads of keys and values" if groups != heads else "")
        fitting = [str(count) for count in range(2, groups + 1) if heads % count == groups % count == 0]
        expected = f"{', '.join(fitting) or 'no other'}: a number that divides the {what}"
        raise InvalidValue(option, gpus, expected)

    class Split(ParallelStyle):
        def __init__(self, style: ParallelStyle) -> None:
            super().__init__()
            self._style = style

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            before(module)
            return parallelize_module(module, device_mesh, self._style)

    split = {name: Split(made) for name, style in plan.items() if (made := styles[style]) is not None}
    parallelize_module(model, mesh, split)  # type: ignore[arg-type]


def split_attention(mesh: DeviceMesh) -> None:
    """Have `F.scaled_dot_product_attention` take its query, key and value as parts of a sequence, for good.

    It is what PyTorch's context manager `context_parallel` does as it is entered (torch 2.13,
    torch/distributed/tensor/experimental/_context_parallel/_attention.py), which cuts the batch besides: `own_tokens`.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

    context_parallel._dispatch_mode = context_parallel._DispatchMode.MONKEY_PATCH
    context_parallel._enable_context_parallel_dispatcher_impl(seq_dim=2, mesh=mesh)


def own_tokens(batch: Any, seq_len: int | None, parts: int) -> Any:
    """What each of so many GPUs has of a batch of sequences: two runs of tokens, one early and one late.

    Tensors whose second dimension is the sequence are cut, and a mask of padding goes, as with accelerate
    (`_attach_context_parallel_hooks` of
    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/big_modeling.py). A sequence is padded to a
    multiple of twice the GPUs.
    """
    length = 2 * -(-(seq_len or 1) // (2 * parts))

    def cut(leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.size(1) == seq_len
        return leaf[:, :length].clone() if whole else leaf

    if isinstance(batch, dict):
        batch = {name: each for name, each in batch.items() if name != "attention_mask"}
    return pytree.tree_map(cut, batch)


def sum_gradients(model: nn.Module, now: bool) -> None:
    """Have the next backward of a model sum gradients over the GPUs, and shard those of shards, or keep them.

    accelerate keeps them whole until the last micro-batch of a step (`Accelerator.no_sync`); what a user's own calls
    have sharded is left as it is.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = now  # as its `no_sync` does
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if callable(set_sync):
        set_sync(now)
    for module in model.modules() if hasattr(model, "_fsdp_wrapped_module") else ():
        if hasattr(module, "_fsdp_wrapped_module"):
            # What `FullyShardedDataParallel.no_sync` sets, around a forward and its backward (torch 2.13).
            module._sync_gradients = now  # type: ignore[assignment]


def fullest_rank(model: nn.Module, gpus: int) -> int:
    """The rank that `ZeroRedundancyOptimizer` gives the most elements.

    It deals out parameters from the largest to the smallest, each to the rank that has the least then
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/optim/zero_redundancy_optimizer.py,
    `_partition_parameters`).
    """
    dealt = [0] * gpus
    for size in sorted((each.numel() for each in model.parameters() if each.requires_grad), reverse=True):
        dealt[dealt.index(min(dealt))] += size
    return dealt.index(max(dealt))


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def spread_optimizer(config: StepConfig) -> Callable[[Make, list[nn.Parameter]], torch.optim.Optimizer] | None:
    """What makes an optimizer that is spread over the GPUs of what makes a usual one; None where none is."""
    if config.strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return lambda make, parameters: ZeroRedundancyOptimizer(parameters, optimizer_class=make)  # type: ignore[arg-type]
    if config.strategy == "zero2":
        return partial(PartitionedOptimizer, gpus=config.gpus, wide=config.precision != "bf16-true")
    return None


BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: of one bucket, which is in the parameters' type."""


class PartitionedOptimizer(torch.optim.Optimizer):
    """The last of several ranks of DeepSpeed's ZeRO-2: parameters in one tensor, and of all else an Nth.

    Each backward makes a bucket, in which gradients are collected. Once it is full, or at the end, it is copied to be
    summed; what is of this rank goes to a tensor of its own, and the rest is forgotten. Backwards go from the last
    parameters to the first, so the last rank has its gradients for longest.

    Args:
        make: makes the optimizer of the rank's part.
        parameters: of one type.
        gpus: the number of ranks.
        wide: whether the part is in fp32, and not in the parameters' type (`bf16_master_weights_and_grads`).
    """

    def __init__(self, make: Make, parameters: list[nn.Parameter], gpus: int, wide: bool) -> None:
        super().__init__(parameters, {})
        first = parameters[0]
        part = -(-sum(each.numel() for each in parameters) // (2 * gpus)) * 2
        self.flat = torch.empty(part * gpus, dtype=first.dtype, device=first.device)
        place = 0
        self.own: dict[nn.Parameter, None] = {}  # those of which any element is in the last part
        for each in parameters:
            view = self.flat[place : place + each.numel()].view_as(each)
            view.copy_(each.data)
            each.data = view
            place += each.numel()
            if place > part * (gpus - 1):
                self.own[each] = None
            each.register_post_accumulate_grad_hook(self._collect)
        held = self.flat[part * (gpus - 1) :].clone()
        self.part = nn.Parameter(held.float() if wide else held)
        self.inner = make([self.part])
        self.state, self.tables = self.inner.state, [self.part.data]
        self.bucket: torch.Tensor | None = None
        self.filled = 0
        self.waiting: list[nn.Parameter] = []
        self.own_gradients: torch.Tensor | None = None
        self.summed: torch.Tensor | None = None

    @torch.no_grad()
    def _collect(self, parameter: torch.Tensor) -> None:
        """Move a gradient into the bucket (`reduce_independent_p_g_buckets_and_remove_grads`)."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if self.bucket is None:
            self.bucket = torch.empty(BUCKET_ELEMENTS, dtype=self.flat.dtype, device=self.flat.device)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self.filled + parameter.numel() > BUCKET_ELEMENTS:
            self._reduce()
        if parameter.numel() <= BUCKET_ELEMENTS:
            place = self.bucket[self.filled : self.filled + parameter.numel()].view_as(parameter)
            place.copy_(parameter.grad)
            parameter.grad = place
        self.filled += parameter.numel()
        self.waiting.append(parameter)

    @torch.no_grad()
    def _reduce(self) -> None:
        """Sum the bucket over the ranks and keep what is this one's (`reduce_ipg_grads`, `copy_grads_in_partition`)."""
        assert self.bucket is not None
        if self.filled <= BUCKET_ELEMENTS:
            torch.empty(self.filled, dtype=self.flat.dtype, device=self.flat.device)  # flattened, to be sent
        for parameter in self.waiting:
            if parameter in self.own and self.own_gradients is None:
                total = sum(each.numel() for each in self.own)
                self.own_gradients = torch.empty(total, dtype=self.flat.dtype, device=self.flat.device)
            parameter.grad = None
        self.waiting.clear()
        self.filled = 0

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Another micro-batch's gradients are added to what is there (`independent_gradient_partition_epilogue`)."""
        self._reduce()
        if self.summed is None:
            self.summed = self.own_gradients
        self.own_gradients = self.bucket = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.summed = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The rank's gradients in one tensor, that in fp32, and the step; what it changed is gathered in place."""
        flat = torch.empty(self.part.numel(), dtype=self.flat.dtype, device=self.flat.device)
        self.part.grad = flat.to(self.part.dtype)
        del flat
        self.summed = None
        self.inner.step()
        self.part.grad = None
