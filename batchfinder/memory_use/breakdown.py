"""What the memory of one recorded size is for: by kind, by module as a tree, and by kind over time.

The kinds add up to all that the process takes from the card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from batchfinder.simulator.alloc_conf import DEFAULT_SETTINGS, AllocatorSettings
from batchfinder.simulator.allocator import UNLIMITED, CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.replay import OomEvent, PeakEvent, alive_at, replay
from batchfinder.simulator.steady_state import simulate_steady_state, smallest_usable_bytes
from batchfinder.simulator.trace import StageMark, Trace

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
        activations: made in a forward or its loss and alive when the backward begins, so kept for it (without a
            backward: alive when the forward ends).
        temporary: every other tensor: results on their way through a layer, gradients of activations, what
            checkpointing recomputes, the optimizer's intermediate results, autocast's copies that nothing keeps.
        inputs: the batches on the card; the old one is released once the new one is there.
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

    def shown(self) -> dict[str, int]:
        """By name in this module's order; communication only where there is some."""
        values = asdict(self)
        return {name: values[name] for name in NAMES if name != "communication" or values[name]}


def kind_of(trace: Trace, block: int) -> str:
    """A block's kind, as a field of `Kinds`."""
    return _KIND_OF[trace.structure.kinds[block]]


def bytes_by_kind(trace: Trace, blocks: Iterable[int]) -> dict[str, int]:
    """Bytes of some blocks by kind; kinds without any are left out."""
    totals: dict[str, int] = {}
    for block in blocks:
        kind = kind_of(trace, block)
        totals[kind] = totals.get(kind, 0) + trace.sizes[block]
    return totals


LARGEST = 10
"""Tensors that are listed unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, or a kernel's own memory, at the moment of the peak.

    Attributes:
        shape: its type and dimensions (`float32[8, 128]`); empty where they are not known.
        kind: a field of `Kinds`.
        module: as in `TraceStructure.modules`; empty outside the model.
    """

    bytes: int
    shape: str
    kind: str
    module: str
    operator: str

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "shape": self.shape or None,
            "kind": self.kind,
            "module": self.module,
            "operator": self.operator,
        }


@dataclass(frozen=True, slots=True)
class Peak:
    """A moment of the replay: right after one allocation."""

    moment: PeakEvent
    tensor: Tensor

    def to_json(self) -> dict[str, Any]:
        moment = self.moment
        return {
            "step": moment.step,
            "stage": moment.stage,
            "micro_batch": moment.micro_batch,
            "module": self.tensor.module,
            "operator": self.tensor.operator,
            "requested_bytes": self.tensor.bytes,
            "shape": self.tensor.shape or None,
        }


@dataclass(frozen=True)
class Estimate:
    """The memory of one size.

    The peak is the first moment with the most bytes in live blocks. The memory counted there is the most that the
    allocator reserved at all, which may happen a little later (often in the optimizer of the second step): it keeps
    what it has reserved, so each later step reaches its peak with that much. In recordings of four steps neither figure
    changed after the second.

    Attributes:
        alive: the blocks alive at the peak, by number.
        kinds: bytes by kind at the peak; they sum to `peak_bytes`.
        peak_bytes: everything the process takes from the card: reserved and context.
        allocated_bytes: in live blocks at the peak, as `torch.cuda.memory_allocated` counts.
        capacity_bytes: what the card has for this process, the context included.
        required_bytes: the least a card must have for this size to run, the context included.
        fits: whether the card has room, step after step. If not, the other figures are those of an unlimited card.
        peak: the allocation at which it was reached; None when nothing was allocated.
        last_segment: when the allocator last had to take memory from the card; None likewise.
        oom: the allocation that the card had no room for; None where there was none.
    """

    trace: Trace
    alive: tuple[int, ...]
    kinds: Kinds
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    required_bytes: int
    fits: bool
    peak: Peak | None
    last_segment: Peak | None
    num_alloc_retries: int
    oom: OomEvent | None

    def largest(self, count: int = LARGEST) -> tuple[Tensor, ...]:
        """The largest tensors alive at the peak, the largest first, the earlier made first among equals."""
        blocks = sorted(self.alive, key=lambda block: (-self.trace.sizes[block], block))[:count]
        return tuple(_tensor(self.trace, block) for block in blocks)

    def to_json(self) -> dict[str, Any]:
        return {
            **{f"{kind}_bytes": size for kind, size in self.kinds.shown().items()},
            "peak_bytes": self.peak_bytes,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "capacity_bytes": self.capacity_bytes,
            "required_bytes": self.required_bytes,
            "fits": self.fits,
        }


def estimate(
    trace: Trace, memory: DeviceMemory, context_bytes: int = 0, settings: AllocatorSettings = DEFAULT_SETTINGS
) -> Estimate:
    """Replay a step on a card and divide its memory by kind.

    Args:
        context_bytes: what the CUDA context takes of the card beside what is usable.
    """
    structure, sizes = trace.structure, trace.sizes
    steady = simulate_steady_state(structure, sizes, lambda: CachingAllocator(memory, settings))
    timeline = steady.timeline
    if not steady.fits:
        timeline = replay(structure, sizes, CachingAllocator(UNLIMITED, settings))
    at_peak, last = timeline.allocated_peak, timeline.reserved_peak
    alive = () if at_peak is None else tuple(alive_at(structure, at_peak.position))
    held = bytes_by_kind(trace, alive)
    reserved = timeline.max_reserved_bytes
    kinds = Kinds(**held, fragmentation=reserved - sum(held.values()), context=context_bytes)
    return Estimate(
        trace=trace,
        alive=alive,
        kinds=kinds,
        peak_bytes=reserved + context_bytes,
        allocated_bytes=timeline.max_allocated_bytes,
        reserved_bytes=reserved,
        capacity_bytes=memory.capacity_bytes + context_bytes,
        required_bytes=smallest_usable_bytes(structure, sizes, settings, context_bytes) + context_bytes,
        fits=steady.fits,
        peak=None if at_peak is None else Peak(at_peak, _tensor(trace, at_peak.block)),
        last_segment=None if last is None else Peak(last, _tensor(trace, last.block)),
        num_alloc_retries=timeline.num_alloc_retries,
        oom=steady.timeline.oom,
    )


def _tensor(trace: Trace, block: int) -> Tensor:
    structure = trace.structure
    return Tensor(
        bytes=trace.sizes[block],
        shape=trace.shapes[block] if trace.shapes else "",
        kind=kind_of(trace, block),
        module=structure.modules[block],
        operator=structure.operators[block],
    )


OUTSIDE = ("input", "workspace", "communication")
"""Kinds of blocks that belong to no module, whichever was running when they were made."""


@dataclass
class ModuleBytes:
    """A module's own bytes, and the modules in it; sums are with those.

    Attributes:
        name: the last part of its path, or `*` for all modules of a list; empty for the model itself.
        count: how many modules this is: more than one for a list's.
        own: bytes by kind, without those of the modules in it.
        children: those modules, in the order in which they appear.
    """

    name: str
    count: int = 1
    own: dict[str, int] = field(default_factory=dict)
    children: list[ModuleBytes] = field(default_factory=list)

    def by_kind(self) -> dict[str, int]:
        totals = dict(self.own)
        for child in self.children:
            for kind, size in child.by_kind().items():
                totals[kind] = totals.get(kind, 0) + size
        return totals

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def to_json(self, above: str = "") -> dict[str, Any]:
        """As JSON values: each module, by its path, with what it and the modules in it hold."""
        path = f"{above}.{self.name}" if above else self.name
        return {
            "module": path,
            "bytes": self.total,
            **{f"{kind}_bytes": size for kind, size in self.by_kind().items()},
            "modules": [child.to_json(path) for child in self.children],
        }


def module_tree(trace: Trace, blocks: Iterable[int]) -> ModuleBytes:
    """Blocks by the module they belong to.

    Returns:
        The model, whose own bytes are those that belong to no module in it; its total is that of the blocks.
    """
    root = ModuleBytes("")
    known = {"": root}

    def node(path: str) -> ModuleBytes:
        if path not in known:
            above, _, name = path.rpartition(".")
            known[path] = ModuleBytes(name)
            node(above).children.append(known[path])
        return known[path]

    structure = trace.structure
    for block in blocks:
        own = node("" if structure.kinds[block] in OUTSIDE else structure.modules[block]).own
        kind = kind_of(trace, block)
        own[kind] = own.get(kind, 0) + trace.sizes[block]
    return root


def fold_lists(*like: ModuleBytes, name: str | None = None) -> ModuleBytes:
    """A module's tree with the modules of each list merged into one, as a model's layers are alike.

    Of several modules, such as those of a list: one with their own bytes added up, and with children of one name merged
    in turn.
    """
    one = ModuleBytes(like[0].name if name is None else name, sum(module.count for module in like))
    children: dict[str, list[ModuleBytes]] = {}
    for module in like:
        for kind, size in module.own.items():
            one.own[kind] = one.own.get(kind, 0) + size
        for child in module.children:
            children.setdefault("*" if child.name.isdecimal() else child.name, []).append(child)
    one.children = [fold_lists(*alike, name=child_name) for child_name, alike in children.items()]
    return one


@dataclass(frozen=True)
class OverTime:
    """Bytes that tensors hold, after each event.

    Attributes:
        by_kind: one figure per event, by kind, in the order in which kinds are shown; kinds that never hold anything
            are left out.
        peak: the event after which tensors hold most; the first such one.
        peak_bytes: what they hold then.
        modules: the module whose block each event allocates or releases, by event.
    """

    by_kind: Mapping[str, tuple[int, ...]]
    marks: tuple[StageMark, ...]
    peak: int
    peak_bytes: int
    modules: tuple[str, ...]


def bytes_over_time(trace: Trace) -> OverTime:
    """Sum what is alive by kind after each event."""
    now = dict.fromkeys(NAMES, 0)
    series: dict[str, list[int]] = {kind: [] for kind in now}
    totals: list[int] = []
    total = 0
    for event in trace.structure.order:
        block = event if event >= 0 else ~event
        change = trace.sizes[block] if event >= 0 else -trace.sizes[block]
        now[kind_of(trace, block)] += change
        total += change
        totals.append(total)
        for kind, size in now.items():
            series[kind].append(size)
    peak = max(range(len(totals)), key=totals.__getitem__, default=0)
    modules = trace.structure.modules
    return OverTime(
        by_kind={kind: tuple(sizes) for kind, sizes in series.items() if any(sizes)},
        marks=trace.structure.marks,
        peak=peak,
        peak_bytes=max(totals, default=0),
        modules=tuple([modules[event if event >= 0 else ~event] for event in trace.structure.order]),
    )
