"""The simulator's answers, recorded and replayed in the background while the card is measured."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from batchfinder.recording.simulation import Simulation, StepConfig, search_simulated
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import WorkloadSpec
from benchmarks.cuda_parts.cells import BUILDER, Cell, Ladder
from benchmarks.cuda_parts.stages import Stage, replay_stages


@dataclass(frozen=True)
class Card:
    """What is predicted for.

    Attributes:
        name: as the driver or the catalogue has it.
        total_bytes: what it has.
        free_bytes: what the allocator could take of it.
        capability: major and minor.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]

    def memory(self, limit_bytes: int | None = None) -> DeviceMemory:
        """The card, with the limit that a memory fraction sets.

        Args:
            limit_bytes: what the allocator may reserve; None for all there is.
        """
        return DeviceMemory(self.total_bytes, min(self.free_bytes, self.total_bytes), limit_bytes)


class Predictions:
    """One recording process per model, shared by all that is asked of it.

    Args:
        card: what is predicted for.
        workers: recordings at once, each in a process of its own.
    """

    def __init__(self, card: Card, workers: int | None = None) -> None:
        self.card = card
        self._pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)
        self._simulations: dict[str, Simulation] = {}
        self._opening = threading.Lock()

    def close(self) -> None:
        """End the recording processes; what has not begun is left."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._opening:
            for simulation in self._simulations.values():
                simulation.close()
        self._pool.shutdown(wait=True)

    def trace(self, cell: Cell) -> Future[Trace]:
        """The step's trace, recorded at the cell's own size.

        Args:
            cell: the step.
        """
        return self._pool.submit(self._trace, cell)

    def largest(self, ladder: Ladder, settings: AllocatorSettings) -> Future[list[dict[str, Any]]]:
        """The largest batch under each budget, and the largest that trains without giving back its cache.

        Args:
            ladder: the step and the budgets.
            settings: the allocator's.
        """
        return self._pool.submit(self._largest, ladder, settings)

    def stages(self, trace: Trace) -> tuple[list[Stage], str]:
        """A trace replayed on the card, stage by stage, and the message where the card is too small.

        Args:
            trace: of a cell.
        """
        return replay_stages(trace, CachingAllocator(self.card.memory()))

    def _simulation(self, cell: Cell) -> Simulation:
        with self._opening:
            if cell.model not in self._simulations:
                spec = WorkloadSpec(BUILDER, {"spec": cell.model})
                self._simulations[cell.model] = Simulation(spec, StepConfig())
            return self._simulations[cell.model].varied(cell.spec(), cell.how())

    def _trace(self, cell: Cell) -> Trace:
        source = self._simulation(cell).source(self.card.capability, [cell.seq_len])
        return source.recorded(cell.batch_size, cell.seq_len)

    def _largest(self, ladder: Ladder, settings: AllocatorSettings) -> list[dict[str, Any]]:
        cell = ladder.cell
        source = self._simulation(cell).source(self.card.capability, [cell.seq_len])
        source.prefetch()
        rows = []
        for budget in ladder.budgets:
            probe = SimulatedProbe(source, self.card.memory(budget), settings)
            largest = search_simulated(probe, Shape(cell.seq_len)).max_batch_size
            calm = _calm(probe, Shape(cell.seq_len), largest)
            rows.append({"budget_bytes": budget, "predicted": largest, "predicted_without_retries": calm})
        return rows


def _calm(probe: SimulatedProbe, shape: Shape, largest: int) -> int:
    """The largest size, from the largest that trains downwards, whose replay never gives back its cache."""
    return next((size for size in range(largest, 0, -1) if not probe.timeline(size, shape).num_alloc_retries), 0)
