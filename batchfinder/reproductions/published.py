"""The published figures, each with its source, and what every table of them shares."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from batchfinder.errors import CardNeeded, InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.measure.child_probe import ChildProcessProbe, query_gpu
from batchfinder.recording.simulation import Simulation
from batchfinder.report.table import Table
from batchfinder.results import Shape
from batchfinder.search import Secant
from batchfinder.simulator.scaling import TraceSource
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import GIB, format_bytes


@functools.cache
def published_titan_x() -> dict[tuple[str, int], int]:
    """The largest batch sizes that google-research/bert published for one 12 GB Titan X, by (model, sequence length).

    TensorFlow 1.11, fine-tuning with Adam in fp32; 0 where not even one sample fits.
    """
    table = tomllib.loads(files(__package__).joinpath("titan_x.toml").read_text())
    return {
        (row["model"], seq_len): size
        for row in table["rows"]
        for seq_len, size in zip(row["seq_len"], row["max_batch_size"], strict=True)
    }


RUNGS = (4, 8, 16, 32, 64, 128, 256, 512)
"""The batch sizes that a ladder tries, until one does not fit."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`torch.cuda.memory_allocated() // 2**20` after one forward pass, its output and graph still alive.

    `head` is `classification` or `pretraining`, `size` is `base` or `large`.
    """

    head: str
    size: str
    batch_size: int
    seq_len: int
    allocated_mib: int


@dataclass(frozen=True, slots=True)
class Ladder:
    """The last of `RUNGS` that ran before the first out of memory; with `no_grad`, under `torch.no_grad`."""

    head: str
    size: str
    seq_len: int
    no_grad: bool
    largest: int


@dataclass(frozen=True, slots=True)
class Notebook:
    """All that it printed.

    Attributes:
        total_bytes: the card's memory, from its error messages.
        usable_bytes: what PyTorch's allocator could get of it.
        model_mib: `memory_allocated()` with nothing but the model there, by (head, size); rounded down.
        figures, ladders: in the order in which they were printed.
    """

    total_bytes: int
    usable_bytes: int
    model_mib: dict[tuple[str, str], int]
    figures: tuple[Figure, ...]
    ladders: tuple[Ladder, ...]


@functools.cache
def published_bert_2019() -> Notebook:
    """The notebook's figures. Its source and its conditions are in bert_2019.toml."""
    table = tomllib.loads(files(__package__).joinpath("bert_2019.toml").read_text())
    return Notebook(
        total_bytes=int(table["total_gib"] * GIB),
        usable_bytes=int(table["usable_gib"] * GIB),
        model_mib={(head, size): mib for name, mib in table["model_mb"].items() for _, size, head in [name.split("-")]},
        figures=tuple(Figure(*row) for row in table["forward"]),
        ladders=tuple(Ladder(*row) for row in table["ladder"]),
    )


@dataclass(frozen=True, slots=True)
class PaperEstimate:
    """What it assumes, and what it comes to.

    Attributes:
        batch_size: of all GPUs together.
        tabular_features: numbers per sample beside the text.
        verdict: `fits`, or not.
        parameters: numbers by part of the model.
        mb_per_gpu: 10**6 bytes on one GPU, by what they are for, and in all.
    """

    source: str
    instance: str
    batch_size: int
    batch_size_per_gpu: int
    seq_len: int
    precision: str
    tabular_features: int
    verdict: str
    parameters: dict[str, int]
    mb_per_gpu: dict[str, int]


@functools.cache
def published_multimodal_bert() -> PaperEstimate:
    """The estimate's figures. Its source and its conditions are in multimodal_bert.toml."""
    return PaperEstimate(**tomllib.loads(files(__package__).joinpath("multimodal_bert.toml").read_text()))


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What `torch.cuda` counted when a stage was over, in MiB.

    Attributes:
        stage: `begin` (the model is on the GPU), `zero_grad`, `forward`, `loss`, `backward` or `optimizer`.
        reserved: taken from the card then; "cached" in those days.
    """

    step: int
    stage: str
    allocated: int
    max_allocated: int
    reserved: int
    max_reserved: int


@dataclass(frozen=True, slots=True)
class Seq2SeqThread:
    """All that it printed, in order, for `batch_size` pairs of sentences of `length` tokens each."""

    source: str
    batch_size: int
    length: int
    stages: tuple[StageFigures, ...]


@functools.cache
def published_seq2seq() -> Seq2SeqThread:
    """The thread's figures. Its source and its conditions are in seq2seq.toml."""
    table = tomllib.loads(files(__package__).joinpath("seq2seq.toml").read_text())
    return Seq2SeqThread(
        source=table["source"],
        batch_size=table["batch_size"],
        length=table["length"],
        stages=tuple(StageFigures(step, *row) for step in (0, 1) for row in table[f"step_{step}"]),
    )


@dataclass(frozen=True)
class Context:
    """Where a table's figures are found.

    Attributes:
        simulation: whose recording process, with its libraries imported, serves all tables.
        status: is told what is being done.
        device: where the cells are measured as well, such as `cuda:0`; None for the simulation alone.
    """

    simulation: Simulation
    status: Callable[[str], object]
    device: str | None = None

    def source(
        self, spec: WorkloadSpec, step: StepConfig, capability: tuple[int, int], seq_lens: Iterable[int | None]
    ) -> TraceSource:
        """A workload's traces at any size, the first recordings of which are under way."""
        source = self.simulation.with_spec(spec, step).source(capability, seq_lens)
        source.prefetch()
        return source


@dataclass(frozen=True)
class Reproduction:
    """A published table and ours.

    Attributes:
        rows: one for each published cell, as JSON values; each begins as `row` makes it.
        tables: the same for people, as one or more tables.
        notes: sources, what is emulated or left out, and where the original went wrong.
    """

    name: str
    rows: tuple[dict[str, Any], ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Its name, rows and notes as JSON values."""
        return {"name": self.name, "rows": list(self.rows), "notes": list(self.notes)}


def row(cell: str, published: float | None, ours: float | None, **more: Any) -> dict[str, Any]:
    """One cell as JSON values, with `ratio`: ours by published, None where one is missing or the published one is 0."""
    ratio = round(ours / published, 4) if published and ours is not None else None
    return {"cell": cell, "published": published, "ours": ours, "ratio": ratio, **more}


DEVICE = "cuda:0"


def require_card(needed_bytes: dict[str, int], device: str = DEVICE) -> str:
    """A GPU that is here and has room for the cells.

    Args:
        needed_bytes: what PyTorch's allocator must be able to take of it, by table.

    Raises:
        CardNeeded: no GPU that PyTorch can use, or too little of its memory is free.
    """
    table = max(needed_bytes, key=needed_bytes.__getitem__)
    needed = needed_bytes[table]
    needs = f"reproduce {table} --measured needs a GPU with {format_bytes(needed)} free beside its CUDA context"
    try:
        card = query_gpu(device)
    except InvalidValue:
        raise CardNeeded(needed, f"{needs}; PyTorch finds no GPU here") from None
    if card.free_bytes < needed:
        raise CardNeeded(needed, f"{needs}; of the {card.name} here {format_bytes(card.free_bytes)} is free")
    return device


def largest_measured(
    device: str, spec: WorkloadSpec, step: StepConfig, limit_bytes: int, seq_len: int, predicted: int
) -> int:
    """The largest batch that trains on a device that is here: it ran, and the next one up did not.

    Args:
        limit_bytes: what PyTorch's allocator may reserve.
        predicted: the size that is looked at first.
    """
    with ChildProcessProbe(spec, step, device, limit_bytes) as probe:
        search = Secant(limit_bytes, tolerance=0.0, predicted=max(predicted, 1))
        return find_max_batch_size(probe, Shape(seq_len), search=search).max_batch_size
