"""What the notebook "Bert Memory Consumption" printed on 2019-09-18: 17 memory figures and 8 ladders of batch sizes."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from batchfinder.units import GIB

RUNGS = (4, 8, 16, 32, 64, 128, 256, 512)
"""The batch sizes that a ladder tries, until one does not fit."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`torch.cuda.memory_allocated() // 2**20` after one forward pass, its output and graph still alive.

    Attributes:
        head: `classification` or `pretraining`.
        size: `base` or `large`.
        batch_size: samples.
        seq_len: tokens per sample.
        allocated_mib: as it was printed, rounded down.
    """

    head: str
    size: str
    batch_size: int
    seq_len: int
    allocated_mib: int


@dataclass(frozen=True, slots=True)
class Ladder:
    """The last of `RUNGS` that ran before the first out of memory.

    Attributes:
        head: `classification` or `pretraining`.
        size: `base` or `large`.
        seq_len: tokens per sample.
        no_grad: whether the forward ran under `torch.no_grad`.
        largest: the batch size.
    """

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
        figures: in the order in which they were printed.
        ladders: likewise.
    """

    total_bytes: int
    usable_bytes: int
    model_mib: dict[tuple[str, str], int]
    figures: tuple[Figure, ...]
    ladders: tuple[Ladder, ...]


@functools.cache
def bert_2019() -> Notebook:
    """The notebook's figures. Its source and its conditions are in bert_2019.toml."""
    table = tomllib.loads(files(__package__).joinpath("bert_2019.toml").read_text())
    return Notebook(
        total_bytes=int(table["total_gib"] * GIB),
        usable_bytes=int(table["usable_gib"] * GIB),
        model_mib={(head, size): mib for name, mib in table["model_mb"].items() for _, size, head in [name.split("-")]},
        figures=tuple(Figure(*row) for row in table["forward"]),
        ladders=tuple(Ladder(*row) for row in table["ladder"]),
    )
