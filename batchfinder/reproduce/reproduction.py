"""What a reproduction is given, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from batchfinder.report.sheet import Sheet
from batchfinder.reproduce.recordings import Recordings


@dataclass(frozen=True)
class Bench:
    """Where figures are found.

    Attributes:
        recordings: of any workload's steps; one process for all reproductions.
        doing: says what is being done now, in a few words.
        device: where the cells run for real as well, such as `cuda:0`; None for the simulation alone.
    """

    recordings: Recordings
    doing: Callable[[str], None]
    device: str | None = None


@dataclass(frozen=True)
class Reproduction:
    """A published table and ours.

    Attributes:
        name: as `batchfinder reproduce` takes it.
        rows: one for each published cell, as JSON values; each begins as `row` makes it.
        sheets: the same for people, as one or more tables.
        notes: sources, what is emulated or left out, and where the original went wrong.
    """

    name: str
    rows: tuple[dict[str, Any], ...]
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Its name, rows and notes as JSON values."""
        return {"name": self.name, "rows": list(self.rows), "notes": list(self.notes)}


class Reproducer(Protocol):
    """What a module of this package offers."""

    def reproduce(self, bench: Bench) -> Reproduction:
        """Find the table's figures.

        Raises:
            BatchFinderError: a step could not be recorded or run.
        """
        ...

    def needed_bytes(self) -> int:
        """What the allocator must be able to take of a GPU, for the cells to run there under the table's budget."""
        ...


def row(cell: str, published: float | None, ours: float | None, **more: Any) -> dict[str, Any]:
    """One cell as JSON values.

    Args:
        cell: its name.
        published: the figure as it was published.
        ours: the same quantity, found here.
        more: what else there is to say of this cell.

    Returns:
        With `ratio`, ours by published; None where there is nothing to divide, or to divide by.
    """
    ratio = round(ours / published, 4) if published and ours is not None else None
    return {"cell": cell, "published": published, "ours": ours, "ratio": ratio, **more}
