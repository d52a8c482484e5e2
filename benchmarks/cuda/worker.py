"""The child process that uses the card, or its stand-in on a CPU: measures training steps and runs the callback.

    {"measure": {"cell": {...}, "steps": 2, "limit_bytes": null}}  -> {"ran": true, "stages": [...], ...}
    {"history": {"cell": {...}, "steps": 2}, "path": "..."}        -> the same; the memory history is in the file
    {"callback": {...}}                                            -> see `callback.compare`

An error is an answer too: {"error": "...", "dead": whether the card's context is dead}.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.initialization import no_init_weights

from batchfinder.devices.catalog import memory_fraction
from batchfinder.measure.trial import Failure, attempt, clear
from batchfinder.models import build_workload
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.training.child_process import answer, end_with_parent, requests_from
from batchfinder.training.spec import StepConfig
from batchfinder.training.step import Step, Workload
from batchfinder.units import GIB
from benchmarks.cuda.cells import Cell
from benchmarks.cuda.traces import MARKER_BYTES, Event, Stage, read_history, stage_figures

_STAND_IN_BYTES = 8 * GIB
_POOL = 1 << 20


class Meter(Protocol):
    """Counts a device's memory, and limits it.

    Attributes:
        device: where steps run.
    """

    device: torch.device

    def clear(self) -> None:
        """Release what is not in use, and reset the peaks."""
        ...

    def limit(self, limit_bytes: int | None) -> None:
        """Limit what the allocator may reserve; None for no limit."""
        ...

    def counting(self) -> AbstractContextManager[Any]:
        """A context in which memory is counted."""
        ...

    def adapt(self, workload: Workload) -> Workload:
        """The workload, ready for `move`."""
        ...

    def move(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Move the model to the device."""
        ...

    def counters(self) -> tuple[int, int, int, int]:
        """Bytes allocated, their peak, reserved, their peak; the peaks since `reset_peaks`."""
        ...

    def reset_peaks(self) -> None:
        """Start new peaks."""
        ...

    def retries(self) -> int:
        """How often the allocator has released its cache to satisfy a request."""
        ...

    def outside_bytes(self) -> int | None:
        """Bytes in use beside the allocator's: contexts, kernels, other processes. None without a card."""
        ...

    def history(self) -> AbstractContextManager[list[Event]]:
        """A context whose list holds the allocator's history once it has ended."""
        ...


class CudaMeter:
    """A CUDA device, by the counters of `torch.cuda`."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(self.device)
        self._total = torch.cuda.get_device_properties(self.device).total_memory

    def clear(self) -> None:
        clear(self.device)

    def limit(self, limit_bytes: int | None) -> None:
        share = 1.0 if limit_bytes is None else memory_fraction(limit_bytes, self._total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def counting(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def adapt(self, workload: Workload) -> Workload:
        return workload

    def move(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        model.to(self.device, dtype)

    def counters(self) -> tuple[int, int, int, int]:
        device = self.device
        return (
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_reserved(device),
        )

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def outside_bytes(self) -> int | None:
        """What the driver counts as used, less what is reserved."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    @contextmanager
    def history(self) -> Iterator[list[Event]]:
        """`torch.cuda.memory._record_memory_history`, with the Python lines of each allocation."""
        record: Any = torch.cuda.memory._record_memory_history
        events: list[Event] = []
        record(enabled=None)  # turning it off and on empties the ring of an earlier history
        record(enabled="all", context="alloc", stacks="python", max_entries=1_000_000)
        try:
            yield events
            torch.cuda.synchronize(self.device)
            snapshot = torch.cuda.memory._snapshot()
            events += read_history(snapshot["device_traces"][self.device.index])
        finally:
            record(enabled=None)


class StandIn(TorchDispatchMode):
    """For dry runs, the CPU: the storages that operators make while it counts go through the simulated allocator.

    It shows that the measuring functions run and read what they should. Its figures say nothing of a GPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device("cpu")
        self._paused = False
        self._events: list[Event] | None = None
        self._live: dict[int, tuple[Block | None, weakref.ref[Any]]] = {}
        self._allocator = CachingAllocator(DeviceMemory(_STAND_IN_BYTES, _STAND_IN_BYTES))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._paused:
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    self._count(leaf)
        return output

    def clear(self) -> None:
        """Start with an empty allocator; tensors that are still alive are counted no more."""
        clear(self.device)
        self._live.clear()
        self._allocator = CachingAllocator(self._allocator.memory)

    def limit(self, limit_bytes: int | None) -> None:
        """Start with an empty allocator under this limit."""
        self._allocator = CachingAllocator(DeviceMemory(_STAND_IN_BYTES, _STAND_IN_BYTES, limit_bytes))

    def counting(self) -> AbstractContextManager[Any]:
        return self

    def adapt(self, workload: Workload) -> Workload:
        """Batches are made on the host and not counted; the step's copies of them are."""

        def make_batch(batch_size: int, seq_len: int | None) -> Any:
            self._paused = True
            try:
                return workload.make_batch(batch_size, seq_len)
            finally:
                self._paused = False

        return replace(workload, make_batch=make_batch)

    def move(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Replace the model's tensors by copies, which are counted."""
        model._apply(lambda tensor: tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone())

    def counters(self) -> tuple[int, int, int, int]:
        allocator = self._allocator
        return allocator.allocated, allocator.max_allocated, allocator.reserved, allocator.max_reserved

    def reset_peaks(self) -> None:
        self._allocator.reset_peak()

    def retries(self) -> int:
        return self._allocator.num_alloc_retries

    def outside_bytes(self) -> int | None:
        return None

    @contextmanager
    def history(self) -> Iterator[list[Event]]:
        """Allocations, releases and segments."""
        self._events = events = []
        self._allocator.watch_segments(
            lambda action, address, nbytes, stream: events.append((f"segment_{action}", nbytes, address, ""))
        )
        try:
            yield events
        finally:
            self._events = None

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        identity, nbytes = storage._cdata, storage.nbytes()
        if identity in self._live:
            return
        try:
            block = self._allocator.allocate(nbytes)
        except SimulatedOutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None
        if block is not None:
            self._add_event("alloc", nbytes, block)
        allocator = self._allocator

        def released(_: Any) -> None:
            self._live.pop(identity, None)
            if block is not None and allocator is self._allocator:
                self._add_event("free_completed", block.requested, block)
                allocator.free(block)

        self._live[identity] = block, weakref.ref(storage, released)

    def _add_event(self, action: str, nbytes: int, block: Block) -> None:
        if self._events is not None:
            self._events.append((action, nbytes, block.address, ""))


class StageReadings:
    """Called by `Step.run` as each stage begins: reads the counters of the stage before it.

    Args:
        meter: the device.
        markers: whether each stage begins with the allocation of a marker, for the history.
    """

    def __init__(self, meter: Meter, markers: bool) -> None:
        self._meter = meter
        self._markers = markers
        self._current: tuple[int, str, int] | None = None
        self._count = 0
        self.stages: list[Stage] = []

    def __call__(self, step: int, name: str, micro_batch: int) -> None:
        self.close()
        self._current = step, name, micro_batch
        if self._markers:
            torch.empty(MARKER_BYTES + 2 * self._count, dtype=torch.uint8, device=self._meter.device)
        self._count += 1

    def close(self) -> None:
        """Read the current stage's counters, and reset the peaks."""
        if self._current is not None:
            self.stages.append(stage_figures(*self._current, self._meter.counters()))
            self._current = None
        self._meter.reset_peaks()


def measure(
    cell: Cell, meter: Meter, steps: int, limit_bytes: int | None = None, with_history: bool = False
) -> tuple[dict[str, Any], list[Event]]:
    """Take optimizer steps on a cleared device, and clear it again.

    Args:
        cell: the step.
        meter: the device.
        steps: how many.
        limit_bytes: what the allocator may reserve; None for no limit.
        with_history: whether to record every allocation.

    Returns:
        JSON values, `ran` and `stages` among them; and the history.

    Raises:
        Exception: any error of a step other than out of memory.
    """
    workload = meter.adapt(_build(cell))
    settings = replace(cell.step_config(), steps=steps)
    meter.clear()
    meter.limit(limit_bytes)
    allocated, _, reserved, _ = meter.counters()
    readings = StageReadings(meter, with_history)

    retries, started = meter.retries(), time.perf_counter()
    events: list[Event] = []
    with ExitStack() as stack:
        if with_history:
            events = stack.enter_context(meter.history())
        outcome = attempt(partial(_train, workload, settings, meter, readings, cell), meter.device.type)
    failure = outcome if isinstance(outcome, Failure) else None
    result: dict[str, Any] = {
        "ran": failure is None,
        "message": "" if failure is None else failure.message,
        "verdict": "FITS" if failure is None else failure.verdict.name,
        "optimizer_tensors": outcome if failure is None else None,
        "stages": readings.stages,
        "retries": meter.retries() - retries,
        "seconds": round(time.perf_counter() - started, 3),
        "before": {"allocated_bytes": allocated, "reserved_bytes": reserved},
        "outside_bytes": meter.outside_bytes(),
        "settings": asdict(settings),
    }
    del workload
    meter.limit(None)
    meter.clear()
    return result, events


def _train(workload: Workload, settings: StepConfig, meter: Meter, readings: StageReadings, cell: Cell) -> int:
    """Returns the number of tensors in the optimizer's state: none where a GradScaler skipped its steps."""
    copy = None if meter.device.type == "cuda" else lambda tensor, dtype: tensor.to(dtype, copy=True)
    step = Step(workload, settings, meter.device, copy)
    with meter.counting():
        readings(-1, "model", 0)
        meter.move(workload.model, step.weights_dtype)
        step.run(cell.batch_size, cell.seq_len, readings)
        readings.close()
    states = [] if step.optimizer is None else step.optimizer.state.values()
    return sum(isinstance(value, torch.Tensor) for state in states for value in state.values())


def _build(cell: Cell) -> Workload:
    """The cell's workload, with weights from a small pool of random numbers.

    The memory does not depend on their values, and the usual initialization of 10^9 weights takes 10 s.
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


def serve(request: dict[str, Any], meter: Meter) -> dict[str, Any]:
    """The answer to one request; the module's docstring has both."""
    if "measure" in request:
        arguments = request["measure"]
        return measure(Cell(**arguments.pop("cell")), meter, **arguments)[0]
    if "history" in request:
        arguments = request["history"]
        result, events = measure(Cell(**arguments.pop("cell")), meter, **arguments, with_history=True)
        with gzip.open(request["path"], "wt") as file:
            json.dump(events, file)
        return {**result, "path": request["path"]}
    from benchmarks.cuda.callback import compare

    return compare(**request["callback"])


def _is_dead(device: str) -> bool:
    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main(argv: list[str]) -> int:
    """Serve requests; the arguments are the request pipe, the answer pipe and the device."""
    requests, answers, device = int(argv[0]), int(argv[1]), argv[2]
    end_with_parent(requests)
    meter: Meter | None = None
    frozen = False
    for request in requests_from(requests):
        try:
            meter = meter or (StandIn() if device == "cpu" else CudaMeter(torch.device(device)))
            message = serve(request, meter)
        except Exception as error:
            traceback.print_exc()
            message = {"error": f"{type(error).__name__}: {error}"[:2000], "dead": _is_dead(device)}
        answer(answers, message)
        if not frozen:  # a garbage collection of all imported modules takes longer than a small step
            gc.collect()
            gc.freeze()
            frozen = True
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
