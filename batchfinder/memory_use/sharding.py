"""The buckets of DDP's reducer, as blocks of a step that was recorded on one GPU.

The reducer is C++ that reads what tensors hold, and does not run without a GPU; everything else that is sharded is
recorded (`recording.distributed`). Each GPU holds what one GPU would, and a copy of all gradients, where
`gradient_as_bucket_view` does not have it the other way
(https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py, its own documentation). In the first
step the buckets are one, as the order in which gradients become ready is not known yet (`_ddp_init_helper`); before the
second step's forward others are made in that order (`_rebuild_buckets`), each of which is full once it holds 1 MiB (the
first one) or 25 MiB (`dist._DEFAULT_FIRST_BUCKET_BYTES`, `_DEFAULT_BUCKET_CAP_MB`; `compute_bucket_assignment_by_size`,
`initialize_buckets` of torch/csrc/distributed/c10d/reducer.cpp). A static graph (`static_graph=True`) has the same
buckets.

The reducer lets go of the first step's bucket then, but NCCL holds what it sends until its watchdog, which looks every
100 ms, has seen the GPU be done with it, and another collective begins (`workMetaList_`, `shelvesToUnstash_` of
https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). On two processes of
the CUDA stub, whose GPU is done at once, it went anywhere between the second forward's start and the third step. The
host is taken to be ahead of the GPU as far as it can: the bucket is there until the second backward is done.
"""

from __future__ import annotations

from batchfinder.simulator.trace import AddedBlock, Trace
from batchfinder.units import MIB

FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB


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
        updates = [mark.position for mark in structure.marks if mark.step > first and mark.stage == "optimizer"]
        held = updates[0] if updates else None
        before = [AddedBlock(sum(gradients), start, held, "communication", f"{what} of the first step")]
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
