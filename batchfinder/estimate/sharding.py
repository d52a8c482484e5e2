"""What DDP and ZeRO add to and take from a step that was recorded on one GPU.

The recorded step is changed and replayed, so segments, the moment of the peak and the smallest card are those of the
changed step. With `P`, `G` and `O` the bytes of the parameters, the gradients and the optimizer's state and `N` GPUs,
each GPU holds, beside activations and all else:

    DDP              P + G + O + G          the last G are the reducer's buckets
    ZeRO-1           P + G + O/N + G        as DDP with ZeroRedundancyOptimizer
    ZeRO-2           P + G/N + O/N + 2U     2U through each backward

`U` is the larger of the largest layer's parameters and of those of everything in no layer. FSDP, which is ZeRO-3, is
not made of another step but recorded (`recording.distributed`).

- Buckets are a copy of all gradients, where `gradient_as_bucket_view` does not have it the other way
  (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py, its own documentation). In the
  first step they are one, as the order in which gradients become ready is not known yet (`_ddp_init_helper`); before
  the second step's forward that is released and others are made in that order (`_rebuild_buckets`), each of which is
  full once it holds 1 MiB (the first one) or 25 MiB (`dist._DEFAULT_FIRST_BUCKET_BYTES`, `_DEFAULT_BUCKET_CAP_MB`;
  `compute_bucket_assignment_by_size`, `initialize_buckets` of torch/csrc/distributed/c10d/reducer.cpp).
- ZeRO: https://arxiv.org/abs/1910.02054, figure 1: stage 1 leaves each GPU an Nth of the optimizer's state, stage 2 of
  the gradients too.
- 2U: a unit's gradients are whole when they are copied into the buffer they are scattered from.

Approximated: ZeRO's shards are exact Nths, while ZeroRedundancyOptimizer deals out whole parameters; U is there all the
time rather than layer by layer. Left out: the broadcast of weights as DDP is set up, and what NCCL takes outside the
allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from batchfinder.simulator.trace import AddedBlock, Trace, add_blocks
from batchfinder.units import MIB

FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB

STAGES: Mapping[str, int] = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2}
"""The stages of ZeRO; 0 where each GPU has a whole copy of everything."""
RECORDED = "ZeRO-3, FSDP"
"""What is recorded, and not made of another step, by the name that it has beside those."""


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


def sharded_step(trace: Trace, stage: int, num_gpus: int, rebuilds: bool = True) -> Trace:
    """The step of one of several GPUs, each with a batch of its own.

    Args:
        stage: of `STAGES`. From 1 on whatever the optimizer allocates is an Nth, in 2 the gradients too.
        rebuilds: whether the buckets of DDP's first step are made again, as since PyTorch 1.7.
    """
    structure = trace.structure
    sizes = list(trace.sizes)
    if stage >= 1:
        for start, end in _spans(trace, "optimizer", ("optimizer",)):
            for event in structure.order[start:end]:
                if event >= 0:
                    sizes[event] = -(-sizes[event] // num_gpus)
    if stage < 2:
        return add_blocks(replace(trace, sizes=tuple(sizes)), buckets_of(trace, rebuilds))
    whole = [size for size, kind in zip(sizes, structure.kinds, strict=True) if kind == "gradient"]
    for block, kind in enumerate(structure.kinds):
        if kind == "gradient":
            sizes[block] = -(-sizes[block] // num_gpus)
    added = []
    unit = max(layers_of(trace).rest, layers_of(trace).largest)
    if unit and whole:
        for start, end in _spans(trace, "backward", ("backward",)):
            for what in ("whole gradients of the largest unit", "what they are scattered from"):
                added.append(AddedBlock(unit, start, end, "communication", what))
    return add_blocks(replace(trace, sizes=tuple(sizes)), added)


def buckets_of(trace: Trace, rebuilds: bool = True, bucket_bytes: int | None = None) -> list[AddedBlock]:
    """The buckets of DDP's reducer, as blocks of a step that was recorded on one GPU.

    Args:
        rebuilds: whether the first step has one bucket, and the others theirs from the second one's start.
        bucket_bytes: what a bucket holds, the first one too (`bucket_cap_mb`); None for DDP's default.
    """
    structure = trace.structure
    steps = [mark.position for mark in structure.marks if mark.step >= 0]
    first = next((mark.step for mark in structure.marks if mark.step >= 0), 0)
    second = [mark.position for mark in structure.marks if mark.step > first and mark.stage == "forward"]
    end = next((mark.position for mark in structure.marks if mark.step > first), len(structure.order))
    gradients = [
        trace.sizes[i] for i in structure.order[:end] if i >= 0 and structure.kinds[i] == "gradient"
    ]  # as they are made
    start = steps[0] if steps else 0  # the model is there
    what = "the reducer's bucket"
    before = []
    if rebuilds and second and gradients:
        before = [AddedBlock(sum(gradients), start, second[0], "communication", f"{what} of the first step")]
        start = second[0]
    sizes = bucket_sizes(gradients, bucket_bytes)
    return [*before, *(AddedBlock(size, start, None, "communication", what) for size in sizes)]


def bucket_sizes(gradients: list[int], bucket_bytes: int | None = None) -> list[int]:
    """The reducer's buckets.

    Args:
        gradients: bytes of each, in the order in which they become ready.
        bucket_bytes: what a bucket holds; None for DDP's default, whose first one is smaller.
    """
    sizes: list[int] = []
    filling = 0
    for size in gradients:
        filling += size
        if filling >= (bucket_bytes or (BUCKET_BYTES if sizes else FIRST_BUCKET_BYTES)):
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
