"""What every published table shares: where its figures are found, what comes of it, and its cells by real steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
from batchfinder.units import format_bytes


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
        CardNeeded: there is none, or too little of it is free.
    """
    table = max(needed_bytes, key=needed_bytes.__getitem__)
    needed = needed_bytes[table]
    needs = f"reproduce {table} --measured needs a GPU with {format_bytes(needed)} free beside its CUDA context"
    try:
        card = query_gpu(device)
    except InvalidValue:
        raise CardNeeded(needed, f"{needs}; there is none here that PyTorch can use") from None
    if card.free_bytes < needed:
        raise CardNeeded(needed, f"{needs}; of the {card.name} here {format_bytes(card.free_bytes)} is free")
    return device


@dataclass(frozen=True)
class MeasuredStep:
    """A step on a device that is here, whose allocator may reserve `limit_bytes`."""

    device: str
    spec: WorkloadSpec
    how: StepConfig
    limit_bytes: int
    seq_len: int

    def largest(self, predicted: int) -> int:
        """The largest batch that trains: it ran, and the next one up did not. It looks at `predicted` first."""
        with ChildProcessProbe(self.spec, self.how, self.device, self.limit_bytes) as probe:
            search = Secant(self.limit_bytes, tolerance=0.0, predicted=max(predicted, 1))
            return find_max_batch_size(probe, Shape(self.seq_len), search=search).max_batch_size

    def last_rung(self, rungs: Sequence[int]) -> int:
        """The last of a ladder's batch sizes before the first that does not run; 0 if that is the first."""
        largest = 0
        with ChildProcessProbe(self.spec, self.how, self.device, self.limit_bytes) as probe:
            for batch_size in rungs:
                if not probe(batch_size, Shape(self.seq_len)).fits:
                    break
                largest = batch_size
        return largest

    def peak_bytes(self, batch_size: int) -> int | None:
        """The most that was allocated at one time; None where the size does not run."""
        with ChildProcessProbe(self.spec, self.how, self.device, self.limit_bytes) as probe:
            return probe(batch_size, Shape(self.seq_len)).peak_allocated_bytes
