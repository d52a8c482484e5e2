"""What the checks share: the card, the simulator's predictions for it, a child process that uses it, and the time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from batchfinder.devices import Multiprocessors
from batchfinder.recording.simulation import Simulation, search_simulated
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.training.child_process import Child, ChildDied
from batchfinder.training.spec import StepConfig, WorkloadSpec
from benchmarks.cuda.cells import BUILDER, Cell, Ladder
from benchmarks.cuda.report import ResultFile
from benchmarks.cuda.traces import Stage, replay_stages

CHECKS = {"cells": 0.40, "traces": 0.50, "maxima": 0.78, "callback": 0.88, "tests": 1.0}
"""In order, with the share of the time by which each must have ended; what one does not use is the next one's."""

_WORKER = "benchmarks.cuda.worker"
_REQUEST_SECONDS = 90.0
_MIN_REQUEST_SECONDS = 20.0


@dataclass(frozen=True)
class Card:
    """The GPU that is predicted for.

    Attributes:
        name: as the driver or the catalog has it.
        total_bytes: its memory.
        free_bytes: what the allocator could take of it.
        capability: compute capability, major and minor.
        reduces_on: what it divides reductions among.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    reduces_on: Multiprocessors

    def memory(self, limit_bytes: int | None = None) -> DeviceMemory:
        """The card, with the limit in bytes that a memory fraction sets."""
        return DeviceMemory(self.total_bytes, min(self.free_bytes, self.total_bytes), limit_bytes)


class Predictions:
    """The simulator's answers, made in the background, with one recording process for each model."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._simulations: dict[str, Simulation] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Cancel what has not begun, and end the recording processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for simulation in self._simulations.values():
                simulation.close()
        self._pool.shutdown(wait=True)

    def trace(self, cell: Cell) -> Future[Trace]:
        """The step's trace, recorded at the cell's own size."""

        def record() -> Trace:
            source = self._simulation(cell).source(self.card.capability, [cell.seq_len], self.card.reduces_on)
            return source.recorded(cell.batch_size, cell.seq_len)

        return self._pool.submit(record)

    def largest(self, ladder: Ladder, settings: AllocatorSettings) -> Future[list[dict[str, Any]]]:
        """For each budget, the largest batch that trains and the largest that does so without allocation retries."""

        def search() -> list[dict[str, Any]]:
            shape = Shape(ladder.cell.seq_len)
            source = self._simulation(ladder.cell).source(
                self.card.capability, [ladder.cell.seq_len], self.card.reduces_on
            )
            source.prefetch()
            rows = []
            for budget in ladder.budgets:
                probe = SimulatedProbe(source, self.card.memory(budget), settings)
                largest = search_simulated(probe, shape).max_batch_size
                sizes = range(largest, 0, -1)
                calm = next((size for size in sizes if not probe.timeline(size, shape).num_alloc_retries), 0)
                rows.append({"budget_bytes": budget, "predicted": largest, "predicted_without_retries": calm})
            return rows

        return self._pool.submit(search)

    def stages(self, trace: Trace) -> tuple[list[Stage], str]:
        """The trace replayed on the card: its stages, and the out-of-memory message, if any."""
        return replay_stages(trace, CachingAllocator(self.card.memory()))

    def _simulation(self, cell: Cell) -> Simulation:
        with self._lock:
            if cell.model not in self._simulations:
                spec = WorkloadSpec(BUILDER, {"spec": cell.model})
                self._simulations[cell.model] = Simulation(spec, StepConfig())
            return self._simulations[cell.model].with_spec(cell.spec(), cell.step_config())


class RequestFailed(Exception):
    """The child process gave no answer, or an error."""


class CardProcess:
    """The child process that uses the card: started when first asked, killed when it hangs, replaced when it died.

    Args:
        device: as `torch.device` takes it; `cpu` for the stand-in.
        environment: variables to set for the child.
        module: what it runs.
    """

    def __init__(self, device: str, environment: Mapping[str, str] | None = None, module: str = _WORKER) -> None:
        self._arguments = [device]
        self._environment = dict(environment or {})
        self._module = module
        self._child: Child | None = None

    def __enter__(self) -> CardProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the child now, so that its imports run in the meantime."""
        if self._child is None:
            self._child = Child(self._module, self._arguments, self._environment)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request of JSON values and wait for its answer.

        Raises:
            RequestFailed: it answered with an error, died or took too long. A new child takes the next request if the
                child or the card's context is dead.
        """
        self.start()
        assert self._child is not None
        timed_out = threading.Event()

        def kill(pid: int) -> None:
            timed_out.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

        timer = threading.Timer(max(1.0, seconds), kill, (self._child.pid,))
        timer.start()
        try:
            answer = self._child.ask(request)
        except ChildDied as death:
            self.close()
            if timed_out.is_set():
                raise RequestFailed(f"no answer within {seconds:.0f} s; the process was killed") from death
            raise RequestFailed(f"the process ended with {death.exit_code}: {death.last_words[-400:]}") from death
        finally:
            timer.cancel()
        if "error" in answer:
            if answer.get("dead"):
                self.close()
            raise RequestFailed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
            self._child = None


@dataclass
class Context:
    """One run of `cuda_check.py`.

    Attributes:
        device: as `torch.device` takes it; `cpu` for a dry run, which measures stand-ins only.
        predictions: the simulator's, for the card.
        file: where results go.
        seconds: the time for all checks.
        only: what the name of a cell, a ladder or a case must match.
        keep: a folder for the memory histories; None to keep none.
        started: when the time began, by `time.monotonic`.
        process: uses the card, with the allocator's default settings.
    """

    device: str
    predictions: Predictions
    file: ResultFile
    seconds: float
    only: re.Pattern[str] = field(default_factory=lambda: re.compile(""))
    keep: Path | None = None
    started: float = field(default_factory=time.monotonic)
    process: CardProcess = field(init=False)

    def __post_init__(self) -> None:
        self.process = self.new_process({})

    @property
    def dry_run(self) -> bool:
        """Whether there is no card."""
        return self.device == "cpu"

    def new_process(self, environment: Mapping[str, str]) -> CardProcess:
        """A process with its own environment, for the caller to close."""
        return CardProcess(self.device, {**({"OMP_NUM_THREADS": "1"} if self.dry_run else {}), **environment})

    def selected(self, name: str) -> bool:
        """Whether `--only` matches a name."""
        return self.only.search(name) is not None

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def seconds_left(self, check: str) -> float:
        """Seconds until a check must have ended; 0 or less when its time is over."""
        return self.seconds * CHECKS[check] - self.elapsed

    def in_time(self, check: str, name: str) -> bool:
        """Whether a check has time left; if not, the name is listed as not reached."""
        if self.seconds_left(check) > 0:
            return True
        self.file.result["not_reached"].append(f"{check}: {name}")
        self.file.save()
        return False

    def await_result(self, future: Future[Any], check: str) -> Any:
        """A prediction, waited for until the check's time is over."""
        return future.result(timeout=max(1.0, self.seconds_left(check)))

    def ask(self, process: CardProcess, request: Mapping[str, Any], check: str) -> dict[str, Any]:
        """Send a request, with the time limit of a single one.

        Raises:
            RequestFailed: there was no answer.
        """
        return process.ask(request, min(_REQUEST_SECONDS, max(_MIN_REQUEST_SECONDS, self.seconds_left(check))))

    def add(self, check: str, row: dict[str, Any]) -> None:
        """Add a row to a check's results."""
        self.file.result[check].append(row)
        self.file.save()
