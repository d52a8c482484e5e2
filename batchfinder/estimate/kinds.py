"""What the memory of a training step is for, in kinds that sum to all that the process takes from the card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from batchfinder.simulator.trace import Trace

# From a block's kind in a recording to ours.
_KIND_OF: Mapping[str, str] = {
    "parameter": "parameters",
    "buffer": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "temporary": "temporary",
    "input": "inputs",
    "workspace": "workspace",
    "communication": "communication",
}
NAMES: Mapping[str, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "temporary": "temporary buffers",
    "inputs": "inputs",
    "workspace": "cuBLAS workspaces",
    "communication": "communication",
    "fragmentation": "fragmentation",
    "context": "CUDA context",
}
"""Every kind by the name that a reader sees, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Bytes by kind. Tensors count with what they hold; what the allocator adds to that is fragmentation.

    Attributes:
        parameters: the model's parameters and buffers.
        gradients: what `.grad` of the parameters holds.
        optimizer: the tensors in the optimizer's state.
        activations: made in a forward or its loss and still there when the backward begins, so kept for it (without a
            backward: still there when the forward ends).
        temporary: every other tensor: results on their way through a layer, gradients of activations, what
            checkpointing recomputes, the optimizer's intermediate results, autocast's copies that nothing keeps.
        inputs: the batches on the card; the old one goes when the new one has come.
        workspace: cuBLAS workspaces.
        communication: on several GPUs, the buckets gradients are sent in, and layers gathered from their shards.
        fragmentation: reserved by the allocator and held by no tensor: blocks rounded up to 512 B, what was too little
            to split off, and the free blocks of its cache.
        context: the CUDA context and libraries, outside the allocator.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    inputs: int = 0
    workspace: int = 0
    communication: int = 0
    fragmentation: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(asdict(self).values())

    def shown(self) -> dict[str, int]:
        """By name in this module's order; communication only where there is some."""
        values = asdict(self)
        return {name: values[name] for name in NAMES if name != "communication" or values[name]}


def kind_of(trace: Trace, block: int) -> str:
    """A block's kind, as a field of `Kinds`."""
    return _KIND_OF[trace.structure.kinds[block]]


def bytes_by_kind(trace: Trace, blocks: Iterable[int]) -> dict[str, int]:
    """What some blocks' tensors hold, by kind; kinds without any are left out.

    Args:
        trace: whose sizes count.
        blocks: by number.
    """
    totals: dict[str, int] = {}
    for block in blocks:
        kind = kind_of(trace, block)
        totals[kind] = totals.get(kind, 0) + trace.sizes[block]
    return totals
