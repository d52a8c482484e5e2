"""A recorded training step: which blocks of memory it takes and gives back, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Mark:
    """The start of a stage: events from `position` on belong to it, until the next mark.

    Attributes:
        position: index into `Structure.order`.
        step: which optimizer step, from 0; -1 while the model is being built.
        stage: `model`, `batch`, `forward`, `loss`, `backward`, `optimizer`, `zero_grad`, `end`.
        micro_batch: which micro-batch of the step, from 0.
    """

    position: int
    step: int
    stage: str
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Structure:
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
    """

    order: tuple[int, ...]
    marks: tuple[Mark, ...]
    operators: tuple[str, ...]
    modules: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """One training step as it ran at one size.

    Attributes:
        batch_size: samples in a micro-batch.
        seq_len: tokens per sample; None for data of one fixed shape.
        structure: the events.
        sizes: for each block, the bytes that were asked for (not rounded).
        unmodelled: what the recording had to leave out, in words.
        shapes: for each block, its first tensor's type and dimensions (`float32[8, 128]`), empty where it is not known;
            empty as a whole for a trace that was scaled, which is equal to a recorded one all the same.
    """

    batch_size: int
    seq_len: int | None
    structure: Structure
    sizes: tuple[int, ...]
    unmodelled: tuple[str, ...] = ()
    shapes: tuple[str, ...] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON values; names are written once and referred to by index."""
        structure = self.structure
        names = sorted({*structure.operators, *structure.modules, *structure.kinds, *self.shapes})
        index = {name: i for i, name in enumerate(names)}
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
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        """The inverse of `to_json`.

        Raises:
            ValueError: the data is of another schema.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"trace of schema {data.get('schema')!r}; this version reads {SCHEMA}")
        names = data["names"]
        structure = Structure(
            order=tuple(data["order"]),
            marks=tuple(Mark(*mark) for mark in data["marks"]),
            operators=tuple(names[i] for i in data["operators"]),
            modules=tuple(names[i] for i in data["modules"]),
            kinds=tuple(names[i] for i in data["kinds"]),
        )
        return cls(
            batch_size=data["batch_size"],
            seq_len=data["seq_len"],
            structure=structure,
            sizes=tuple(data["sizes"]),
            unmodelled=tuple(data["unmodelled"]),
            shapes=tuple(names[i] for i in data["shapes"]),
        )
