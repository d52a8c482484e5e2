"""A recorded training step: which blocks of memory it allocates and releases, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from batchfinder.devices import Multiprocessors
from batchfinder.simulator.reductions import Reduction

SCHEMA = 3


@dataclass(frozen=True, slots=True)
class StageMark:
    """The start of a stage: events from `position` in `TraceStructure.order` on belong to it, until the next mark.

    Attributes:
        step: which optimizer step, from 0; -1 while the model is being built.
        stage: `model`, `batch`, `forward`, `loss`, `backward`, `optimizer`, `zero_grad`, `end`.
    """

    position: int
    step: int
    stage: str
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class TraceStructure:
    """All of a trace that is the same at every batch size and sequence length.

    Attributes:
        order: the events. `i >= 0` allocates block i; `~i` (negative) releases it. Blocks are numbered in the order
            in which they are allocated; what is never released is alive at the end.
        marks: where each stage starts, by position.
        operators: for each block, the operator that made it (`aten.addmm.default`).
        modules: for each block, as a dotted path, the module whose forward (or whose part of the backward) made it; for
            parameters, buffers, gradients and the optimizer's state the module that holds them; empty outside the
            model.
        kinds: for each block, `parameter`, `gradient`, `optimizer`, `buffer`, `input`, `activation`, `temporary` or
            `workspace`.
        streams: for each block, the stream that it was allocated on, 0 being the default one; empty where all are that.
        free_completed: for each released block that another stream has used (`Tensor.record_stream`) the position of
            the event before which it can be used again, since the host has waited for that stream, or the end of
            `order`; and the block. Sorted.
    """

    order: tuple[int, ...]
    marks: tuple[StageMark, ...]
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    kinds: tuple[str, ...]
    streams: tuple[int, ...] = ()
    free_completed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """One training step as it ran at one size; `seq_len` is None for data of one fixed shape.

    Attributes:
        sizes: for each block, the bytes that were asked for (not rounded).
        unmodelled: what the recording had to leave out, in words.
        shapes: for each block, its first tensor's type and dimensions (`float32[8, 128]`), empty where it is not known;
            empty as a whole for a trace that was scaled, which is equal to a recorded one all the same.
        compiled: whether torch.compile has compiled a part of the step. Its code is another one at other sizes.
        flops: floating-point operations of one micro-batch's matrix products, convolutions and attention, what is
            recomputed among them, and of a chunked loss two chunks alone; 0 for a trace that was scaled.
        alike: other compute capabilities on which the step is the same, but for the sizes of the blocks given for each,
            as (block, bytes); 0 for what is not allocated there.
        reductions: those that may allocate scratch memory, each with the first of its blocks, one for each field of a
            `Scratch`. Their sizes are 0, until `on` gives them a card's.
    """

    batch_size: int
    seq_len: int | None
    structure: TraceStructure
    sizes: tuple[int, ...]
    unmodelled: tuple[str, ...] = ()
    shapes: tuple[str, ...] = field(default=(), compare=False)
    compiled: bool = False
    flops: int = field(default=0, compare=False)
    alike: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = field(default_factory=dict, compare=False)
    reductions: tuple[tuple[int, Reduction], ...] = ()

    def on(self, card: Multiprocessors) -> Trace:
        """The same on a card, with what reductions allocate there."""
        if not self.reductions:
            return self
        sizes = list(self.sizes)
        scratch = {reduction: reduction.scratch(card) for reduction in {reduction for _, reduction in self.reductions}}
        for block, reduction in self.reductions:
            taken = scratch[reduction]
            sizes[block : block + len(taken)] = taken
        return replace(self, sizes=tuple(sizes))

    def most_held(self) -> list[int]:
        """The most that blocks hold before the first stage and in each, in bytes as they were asked for."""
        taken = (self.sizes[event] if event >= 0 else -self.sizes[~event] for event in self.structure.order)
        held = list(accumulate(taken))
        ends = [0, *(mark.position for mark in self.structure.marks), len(held)]
        return [max(held[start:end], default=0) for start, end in pairwise(ends)]

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON values; names are written once and referred to by index."""
        structure = self.structure
        names = sorted({*structure.operators, *structure.modules, *structure.kinds, *self.shapes})
        index = {name: i for i, name in enumerate(names)}
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(reduction for _, reduction in self.reductions))}
        return {
            "schema": SCHEMA,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "names": names,
            "order": list(structure.order),
            "marks": [[mark.position, mark.step, mark.stage, mark.micro_batch] for mark in structure.marks],
            "operators": [index[name] for name in structure.operators],
            "modules": [index[name] for name in structure.modules],
            "kinds": [index[name] for name in structure.kinds],
            "sizes": list(self.sizes),
            "unmodelled": list(self.unmodelled),
            "shapes": [index[shape] for shape in self.shapes],
            **({"compiled": True} if self.compiled else {}),
            **({"streams": list(structure.streams)} if structure.streams else {}),
            **({"free_completed": list(map(list, structure.free_completed))} if structure.free_completed else {}),
            "flops": self.flops,
            "alike": [[list(capability), list(sizes)] for capability, sizes in self.alike.items()],
            "kinds_of_reductions": [asdict(kind) for kind in kinds],
            "reductions": [[block, kinds[reduction]] for block, reduction in self.reductions],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        """The inverse of `to_json`; ValueError for data of another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"trace of schema {data.get('schema')!r}; this version reads {SCHEMA}")
        names = data["names"]
        kinds = [
            Reduction(**{**kind, "shape": tuple(kind["shape"]), "strides": tuple(kind["strides"])})
            for kind in data["kinds_of_reductions"]
        ]
        structure = TraceStructure(
            order=tuple(data["order"]),
            marks=tuple(StageMark(*mark) for mark in data["marks"]),
            operators=tuple(names[i] for i in data["operators"]),
            modules=tuple(names[i] for i in data["modules"]),
            kinds=tuple(names[i] for i in data["kinds"]),
            streams=tuple(data.get("streams", ())),
            free_completed=tuple([(position, block) for position, block in data.get("free_completed", ())]),
        )
        return cls(
            batch_size=data["batch_size"],
            seq_len=data["seq_len"],
            structure=structure,
            sizes=tuple(data["sizes"]),
            unmodelled=tuple(data["unmodelled"]),
            shapes=tuple(names[i] for i in data["shapes"]),
            compiled=data.get("compiled", False),
            flops=data.get("flops", 0),
            alike={(major, minor): tuple(map(tuple, sizes)) for (major, minor), sizes in data.get("alike", ())},
            reductions=tuple([(block, kinds[i]) for block, i in data["reductions"]]),
        )


def tensor_in_words(dtype: object, shape: Iterable[int]) -> str:
    """A tensor's type and dimensions, as in `Trace.shapes`; `dtype` is PyTorch's."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@dataclass(frozen=True, slots=True)
class AddedBlock:
    """One block to be added to a trace.

    Attributes:
        start: it is allocated just before the event at this position, in the stage that holds it.
        end: it is released just before the event at this position; None when it stays to the end.
    """

    size: int
    start: int
    end: int | None
    kind: str
    operator: str
    module: str = ""


def add_blocks(trace: Trace, added: Iterable[AddedBlock]) -> Trace:
    """A trace with more blocks in it: what the step would hold besides, had it been taken otherwise.

    Blocks are numbered anew, in the order in which they are allocated.

    Args:
        added: in the order in which those with one start are allocated. At one position releases go first.

    Raises:
        ValueError: a block would be released where it is allocated, or before.
    """
    added = tuple(added)
    structure = trace.structure
    old = len(trace.sizes)
    at: dict[int, list[int]] = {}
    for number, block in enumerate(added):
        if block.end is not None:
            if block.end <= block.start:
                raise ValueError(f"a block allocated at {block.start} cannot be released at {block.end}")
            at.setdefault(block.end, []).append(~(old + number))
    for number, block in enumerate(added):
        at.setdefault(block.start, []).append(old + number)
    order: list[int] = []
    moved: list[int] = []  # where each position of the old order, and its end, has gone
    for position in range(len(structure.order) + 1):
        moved.append(len(order))
        order += at.get(position, ())
        order += structure.order[position : position + 1]
    numbers: dict[int, int] = {}
    for event in order:
        if event >= 0:
            numbers[event] = len(numbers)
    before = list(numbers)  # the old number of each new one

    def merged(names: tuple[str, ...], more: list[str]) -> tuple[str, ...]:
        both = (*names, *more)
        return tuple([both[number] for number in before])

    sizes = (*trace.sizes, *(block.size for block in added))
    streams = (*structure.streams, *(0 for _ in added))
    return replace(
        trace,
        structure=TraceStructure(
            order=tuple([numbers[event] if event >= 0 else ~numbers[~event] for event in order]),
            marks=tuple(
                StageMark(moved[mark.position], mark.step, mark.stage, mark.micro_batch) for mark in structure.marks
            ),
            operators=merged(structure.operators, [block.operator for block in added]),
            modules=merged(structure.modules, [block.module for block in added]),
            kinds=merged(structure.kinds, [block.kind for block in added]),
            streams=tuple([streams[number] for number in before]) if structure.streams else (),
            free_completed=tuple([(moved[at], numbers[block]) for at, block in structure.free_completed]),
        ),
        sizes=tuple([sizes[number] for number in before]),
        shapes=merged(trace.shapes, [""] * len(added)) if trace.shapes else (),
        alike={},
        reductions=tuple([(numbers[block], reduction) for block, reduction in trace.reductions]),
    )
