"""One training step on a card, read as each stage ends."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers.initialization import no_init_weights

from batchfinder.measure.cleanup import Failure, attempt
from batchfinder.models import build_workload
from batchfinder.training.step import Step, StepSettings
from batchfinder.training.workload import Workload
from benchmarks.cuda_parts.cells import Cell
from benchmarks.cuda_parts.history import MARKER_BYTES, Event
from benchmarks.cuda_parts.meter import Meter
from benchmarks.cuda_parts.stages import Stage, stage

_POOL = 1 << 20


def build(cell: Cell) -> Workload:
    """The cell's workload, with weights from a small pool of random numbers.

    Their values do not matter to the memory, and the usual initialisation of 10^9 weights takes 10 s.

    Args:
        cell: the step.
    """
    with no_init_weights():
        workload = build_workload(**cell.spec().arguments)
    pool = 0.02 * torch.randn(_POOL, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in workload.model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), _POOL):
                part = flat[start : start + _POOL]
                part.copy_(pool[: part.numel()])
    return workload


class StageReadings:
    """Listens to `Step.run`: what each stage reached, and left.

    Args:
        meter: the card.
        marked: whether each stage begins with the allocation of a marker, for the history.
    """

    def __init__(self, meter: Meter, marked: bool) -> None:
        self._meter = meter
        self._marked = marked
        self._current: tuple[int, str, int] | None = None
        self._begun = 0
        self.stages: list[Stage] = []

    def __call__(self, step: int, name: str, micro_batch: int) -> None:
        """A stage begins, and with it the one before has ended."""
        self.close()
        self._current = step, name, micro_batch
        if self._marked:
            torch.empty(MARKER_BYTES + 2 * self._begun, dtype=torch.uint8, device=self._meter.device)
        self._begun += 1

    def close(self) -> None:
        """Read what the stage at hand has come to."""
        if self._current is not None:
            self.stages.append(stage(*self._current, self._meter.counters()))
            self._current = None
        self._meter.begin_peaks()


def measure(
    cell: Cell, meter: Meter, steps: int, limit_bytes: int | None = None, with_history: bool = False
) -> tuple[dict[str, Any], list[Event]]:
    """Take steps from a clean slate, and give everything back.

    Args:
        cell: the step.
        meter: the card.
        steps: how many optimizer steps.
        limit_bytes: what the allocator may reserve; None for all there is.
        with_history: whether to write down every allocation.

    Returns:
        JSON values: whether it ran, `stages`, retries; and the history.

    Raises:
        Exception: what a step raised that is not about memory.
    """
    workload = meter.adapt(build(cell))
    settings = StepSettings(**{**cell.how().settings(), "steps": steps})
    meter.clear()
    meter.limit(limit_bytes)
    left_over = meter.counters()[:3:2]
    readings = StageReadings(meter, with_history)
    retries, started = meter.retries(), time.perf_counter()
    events: list[Event] = []
    with ExitStack() as stack:
        if with_history:
            events = stack.enter_context(meter.history())
        seen = attempt(partial(_run, workload, settings, meter, readings, cell), meter.device.type)
    answer: dict[str, Any] = {
        "ran": not isinstance(seen, Failure),
        "message": seen.message if isinstance(seen, Failure) else "",
        "verdict": seen.verdict.name if isinstance(seen, Failure) else "FITS",
        "optimizer_tensors": None if isinstance(seen, Failure) else seen,
        "stages": readings.stages,
        "retries": meter.retries() - retries,
        "seconds": round(time.perf_counter() - started, 3),
        "before": {"allocated_bytes": left_over[0], "reserved_bytes": left_over[1]},
        "outside_bytes": meter.outside_bytes(),
        "settings": asdict(settings),
    }
    del workload
    meter.limit(None)
    meter.clear()
    return answer, events


def _run(workload: Workload, settings: StepSettings, meter: Meter, readings: StageReadings, cell: Cell) -> int:
    """Move and train; returns how many tensors the optimizer's state has, none where a scaler skipped its steps."""
    step = Step(workload, settings, meter.device, None if meter.device.type == "cuda" else _copy)
    with meter.watching():
        readings(-1, "model", 0)
        meter.move(workload.model, step.precision.weights)
        step.run(cell.batch_size, cell.seq_len, readings)
        readings.close()
    states = [] if step.optimizer is None else step.optimizer.state.values()
    return sum(isinstance(value, torch.Tensor) for state in states for value in state.values())


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype, copy=True)
