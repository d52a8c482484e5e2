"""The step of one of several GPUs under DDP, ZeRO or FSDP, made from the step recorded on one.

The recorded step is changed and replayed, so segments, the moment of the peak and the smallest card are those of the
changed step. With `P`, `G` and `O` the bytes of the parameters, the gradients and the optimizer's state and `N` GPUs,
each GPU holds, beside activations and all else:

    DDP              P + G + O + G          the last G are the reducer's buckets
    ZeRO-1           P + G + O/N + G        as DDP with ZeroRedundancyOptimizer
    ZeRO-2           P + G/N + O/N + 2U     2U through each backward
    ZeRO-3, FSDP     P/N + G/N + O/N + 2U + R + 2L    R + 2L from each forward to the end of its backward

`L` is the largest layer's parameters, `R` those of everything in no layer, both in the type that is computed in, and
`U` is the larger of the two.

- Buckets: without `gradient_as_bucket_view` they are a copy of all gradients
  (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py, its own documentation). A bucket is
  full once it holds 1 MiB (the first one) or 25 MiB (`dist._DEFAULT_FIRST_BUCKET_BYTES`, `_DEFAULT_BUCKET_CAP_MB`;
  `compute_bucket_assignment_by_size` of torch/csrc/distributed/c10d/reducer.cpp), in the order in which the backward
  makes the gradients.
- ZeRO: https://arxiv.org/abs/1910.02054, figure 1: stage 1 leaves each GPU an Nth of the optimizer's state, stage 2 of
  the gradients too, stage 3 of the parameters too.
- 2U: a unit's gradients are whole when they are copied into the buffer they are scattered from (`foreach_reduce` of
  https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
- R + 2L: the root's own parameters stay gathered from the forward to the backward (`reshard_after_forward=None`), a
  layer is gathered into a flat buffer and then copied out of it (`foreach_all_gather_copy_out`, same file).

Approximated: shards are exact Nths, while ZeroRedundancyOptimizer deals out whole parameters and `fully_shard` pads; U
and L are there all the time rather than layer by layer; a layer that is fetched ahead is not counted; the recorded step
computes with autocast, where FSDP's mixed precision does not. Left out: what NCCL takes outside the allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from batchfinder.simulator.trace import AddedBlock, Trace, add_blocks
from batchfinder.units import MIB


@dataclass(frozen=True, slots=True)
class Layers:
    """Bytes of parameters as they are stored.

    Attributes:
        largest: of the largest layer: of all modules that stand in a list (`encoder.layer.7`), the outermost.
        rest: of everything that is in no layer: embeddings, heads; all of a model without lists.
    """

    largest: int
    rest: int


def layers_of(trace: Trace) -> Layers:
    """The layers that wrapping policies make units of, as in `fully_shard(layer)` for each layer, then the whole model.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html: what was not sharded as part of an inner
    module belongs to the root's own unit.
    """
    structure = trace.structure
    units: dict[str, int] = {}
    for kind, module, size in zip(structure.kinds, structure.modules, trace.sizes, strict=True):
        if kind == "parameter":
            # The path of the layer that the module is in: up to its number in a list; empty for one that is in none.
            parts = module.split(".")
            ends = (index + 1 for index, part in enumerate(parts) if part.isdecimal())
            unit = ".".join(parts[: next(ends, 0)])
            units[unit] = units.get(unit, 0) + size
    rest = units.pop("", 0)
    return Layers(max(units.values(), default=0), rest)


FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB
_THROUGH_BACKWARD = ("forward", "loss", "zero_grad", "backward")  # some trainers zero gradients after the loss


STRATEGIES: Mapping[str, int] = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3, FSDP": 3}
"""The stages of ZeRO; 0 where each GPU has a whole copy of everything."""


def sharded_step(trace: Trace, stage: int, num_gpus: int, computed_share: float = 1.0) -> Trace:
    """The step of one of several GPUs, each with a batch of its own.

    Args:
        stage: of `STRATEGIES`. From 1 on whatever the optimizer allocates is an Nth, from 2 on the gradients too, and
            in 3 the parameters, whose layers are gathered for their work as `fully_shard` does.
        computed_share: bytes of a number as it is computed with over bytes as it is stored.
    """
    structure = trace.structure
    sizes = list(trace.sizes)

    if stage >= 1:
        for start, end in _spans(trace, "optimizer", ("optimizer",)):
            for event in structure.order[start:end]:
                if event >= 0:
                    sizes[event] = -(-sizes[event] // num_gpus)
    first = next((mark.step for mark in structure.marks if mark.step >= 0), 0)
    end = next((mark.position for mark in structure.marks if mark.step > first), len(structure.order))
    gradients = [sizes[i] for i in structure.order[:end] if i >= 0 and structure.kinds[i] == "gradient"]  # as made
    if stage < 2:
        start = next((mark.position for mark in structure.marks if mark.step >= 0), 0)  # the model is there
        what = "the reducer's bucket"
        buckets = [AddedBlock(size, start, None, "communication", what) for size in bucket_sizes(gradients)]
        return add_blocks(replace(trace, sizes=tuple(sizes)), buckets)
    shared = ("gradient", "parameter") if stage >= 3 else ("gradient",)
    for block, kind in enumerate(structure.kinds):
        if kind in shared:
            sizes[block] = -(-sizes[block] // num_gpus)
    layers = layers_of(trace)
    rest, largest = int(layers.rest * computed_share), int(layers.largest * computed_share)
    added = []
    if stage >= 3:
        gathered = (
            (rest, "gathered: what is in no layer"),
            (largest, "gathered: the largest layer"),
            (largest, "gathered: the largest layer, flat"),
        )
        for start, end in _spans(trace, "forward", _THROUGH_BACKWARD):
            added += [AddedBlock(size, start, end, "communication", what) for size, what in gathered if size]
    unit = max(rest, largest)
    if unit and gradients:
        for start, end in _spans(trace, "backward", ("backward",)):
            for what in ("whole gradients of the largest unit", "what they are scattered from"):
                added.append(AddedBlock(unit, start, end, "communication", what))
    return add_blocks(replace(trace, sizes=tuple(sizes)), added)


def bucket_sizes(gradients: list[int]) -> list[int]:
    """The reducer's buckets.

    Args:
        gradients: bytes of each, in the order in which they become ready.
    """
    sizes: list[int] = []
    filling = 0
    for size in gradients:
        filling += size
        if filling >= (BUCKET_BYTES if sizes else FIRST_BUCKET_BYTES):
            sizes.append(filling)
            filling = 0
    return [*sizes, filling] if filling else sizes


def _spans(trace: Trace, first: str, through: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Positions from the start of each `first` stage to the start of the next stage that is none of `through`."""
    marks = trace.structure.marks
    for number, mark in enumerate(marks):
        if mark.stage == first:
            after = (later.position for later in marks[number + 1 :] if later.stage not in through)
            end = next(after, len(trace.structure.order))
            if end > mark.position:
                yield mark.position, end
