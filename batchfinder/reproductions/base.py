"""What a reproduction is given, and what it makes of it.

Recordings of many workloads by one process, which imports its libraries once.

The same cells by real steps, on a GPU that is here, under the table's budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from batchfinder.errors import CardNeeded, InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.measure.child_probe import ChildProcessProbe, look_at
from batchfinder.recording.client import RecordingClient
from batchfinder.recording.simulation import StepConfig
from batchfinder.report.table import Table
from batchfinder.results import Shape
from batchfinder.search import Secant
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import RecordingJob, WorkloadSpec
from batchfinder.units import format_bytes


@dataclass(frozen=True)
class Context:
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
    sheets: tuple[Table, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Its name, rows and notes as JSON values."""
        return {"name": self.name, "rows": list(self.rows), "notes": list(self.notes)}


class Reproducer(Protocol):
    """What a module of this package offers."""

    def reproduce(self, bench: Context) -> Reproduction:
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


class Recordings:
    """Traces of any workload's steps. The process starts with the first workload that is asked for."""

    def __init__(self) -> None:
        self._recorder: RecordingClient | None = None

    def __enter__(self) -> Recordings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def source(
        self, spec: WorkloadSpec, how: StepConfig, capability: tuple[int, int], seq_lens: Iterable[int | None]
    ) -> TraceSource:
        """A workload's step at any size, whose first recordings are under way.

        Args:
            spec: how to build the workload.
            how: how the step is taken.
            capability: the simulated GPU's compute capability.
            seq_lens: the lengths that will be asked for.
        """
        recorder = self._recorder = self._recorder or RecordingClient(spec)

        def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
            return recorder.submit(RecordingJob(how.settings(), capability, batch_size, seq_len, how.flash, spec))

        source = TraceSource(submit, seq_lens)
        source.prefetch()
        return source


DEVICE = "cuda:0"


def require_card(needed_bytes: dict[str, int], device: str = DEVICE) -> str:
    """A GPU that is here and has room for the cells.

    Args:
        needed_bytes: what PyTorch's allocator must be able to take of it, by table.
        device: which, as `torch.device` takes it.

    Returns:
        The device.

    Raises:
        CardNeeded: there is none, or too little of it is free.
    """
    table = max(needed_bytes, key=needed_bytes.__getitem__)
    needed = needed_bytes[table]
    needs = f"reproduce {table} --measured needs a GPU with {format_bytes(needed)} free beside its CUDA context"
    try:
        card = look_at(device)
    except InvalidValue:
        raise CardNeeded(needed, f"{needs}; there is none here that PyTorch can use") from None
    if card.free_bytes < needed:
        raise CardNeeded(needed, f"{needs}; of the {card.name} here {format_bytes(card.free_bytes)} is free")
    return device


@dataclass(frozen=True)
class RealStep:
    """A step on a device that is here, under a limit.

    Attributes:
        device: as `torch.device` takes it.
        spec: how to build the workload.
        how: how the step is taken.
        limit_bytes: what the allocator may reserve.
        seq_len: tokens per sample.
    """

    device: str
    spec: WorkloadSpec
    how: StepConfig
    limit_bytes: int
    seq_len: int

    def largest(self, predicted: int) -> int:
        """The largest batch that trains: it ran, and the next one up did not.

        Args:
            predicted: where to look first.
        """
        with self._probe() as probe:
            search = Secant(self.limit_bytes, tolerance=0.0, predicted=max(predicted, 1))
            return find_max_batch_size(probe, Shape(self.seq_len), search=search).max_batch_size

    def last_rung(self, rungs: Sequence[int]) -> int:
        """The last of a ladder's batch sizes before the first that does not run; 0 if that is the first.

        Args:
            rungs: the sizes, smallest first.
        """
        largest = 0
        with self._probe() as probe:
            for batch_size in rungs:
                if not probe(batch_size, Shape(self.seq_len)).fits:
                    break
                largest = batch_size
        return largest

    def peak_bytes(self, batch_size: int) -> int | None:
        """The most that was allocated at one time; None where the size does not run.

        Args:
            batch_size: samples in a micro-batch.
        """
        with self._probe() as probe:
            return probe(batch_size, Shape(self.seq_len)).peak_allocated_bytes

    def _probe(self) -> ChildProcessProbe:
        return ChildProcessProbe(self.spec, self.how.settings(), self.device, self.limit_bytes)
