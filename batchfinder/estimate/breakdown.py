"""The memory of a step by module, as a tree, and by kind over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchfinder.estimate.estimate import NAMES, kind_of
from batchfinder.simulator.trace import StageMark, Trace

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


def fold_lists(module: ModuleBytes) -> ModuleBytes:
    """The same tree with the modules of each list merged into one, as a model's layers are alike."""
    children: dict[str, list[ModuleBytes]] = {}
    for child in module.children:
        children.setdefault("*" if child.name.isdecimal() else child.name, []).append(child)
    folded = [fold_lists(_merge(name, like) if name == "*" else like[0]) for name, like in children.items()]
    return ModuleBytes(module.name, module.count, module.own, folded)


def _merge(name: str, like: list[ModuleBytes]) -> ModuleBytes:
    """Several modules as one: their own bytes added up, and children of one name merged in turn."""
    one = ModuleBytes(name, sum(module.count for module in like))
    namesakes: dict[str, list[ModuleBytes]] = {}
    for module in like:
        for kind, size in module.own.items():
            one.own[kind] = one.own.get(kind, 0) + size
        for child in module.children:
            namesakes.setdefault(child.name, []).append(child)
    one.children = [_merge(child_name, children) for child_name, children in namesakes.items()]
    return one


@dataclass(frozen=True)
class OverTime:
    """Bytes that tensors hold, after each event.

    Attributes:
        by_kind: one figure per event, by kind, in the order in which kinds are shown; kinds that never hold anything
            are left out.
        peak: the event after which tensors hold most; the first such one.
        peak_bytes: what they hold then.
    """

    by_kind: Mapping[str, tuple[int, ...]]
    marks: tuple[StageMark, ...]
    peak: int
    peak_bytes: int


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
    return OverTime(
        by_kind={kind: tuple(sizes) for kind, sizes in series.items() if any(sizes)},
        marks=trace.structure.marks,
        peak=peak,
        peak_bytes=max(totals, default=0),
    )
