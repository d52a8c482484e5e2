"""A card's counters, and the history of its allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from batchfinder.devices.device import memory_fraction
from batchfinder.measure.cleanup import clear
from batchfinder.measure.cuda_probe import numbered
from batchfinder.training.workload import Workload
from benchmarks.cuda_parts.history import Event, read_history


class Meter(Protocol):
    """What is asked of a card's memory.

    Attributes:
        device: where steps run.
    """

    device: torch.device

    def clear(self) -> None:
        """Give back what is not in use, and begin new peaks."""
        ...

    def limit(self, limit_bytes: int | None) -> None:
        """Let the allocator reserve no more than this; None for all there is."""
        ...

    def watching(self) -> AbstractContextManager[None]:
        """A context in which memory is counted."""
        ...

    def adapt(self, workload: Workload) -> Workload:
        """The workload, ready to be moved."""
        ...

    def move(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Put the model on the card."""
        ...

    def counters(self) -> tuple[int, int, int, int]:
        """Allocated, its peak, reserved, its peak; the peaks since `begin_peaks`."""
        ...

    def begin_peaks(self) -> None:
        """Let the peaks begin anew."""
        ...

    def retries(self) -> int:
        """How often the allocator has given back its cache to satisfy a request."""
        ...

    def outside_bytes(self) -> int | None:
        """Taken of the card beside what the allocator has: contexts, kernels, other processes. None without a card."""
        ...

    def history(self) -> AbstractContextManager[list[Event]]:
        """A context whose list holds the allocator's history when it has ended."""
        ...


class CudaMeter:
    """A CUDA device.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self.device = numbered(device)
        torch.cuda.set_device(self.device)
        self._total = torch.cuda.get_device_properties(self.device).total_memory

    def clear(self) -> None:
        """`batchfinder.measure.cleanup.clear`."""
        clear(self.device)

    def limit(self, limit_bytes: int | None) -> None:
        """The process's share of the card."""
        share = 1.0 if limit_bytes is None else memory_fraction(limit_bytes, self._total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def watching(self) -> AbstractContextManager[None]:
        """The allocator always counts."""
        return nullcontext()

    def adapt(self, workload: Workload) -> Workload:
        """As it is."""
        return workload

    def move(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """`nn.Module.to`."""
        model.to(self.device, dtype)

    def counters(self) -> tuple[int, int, int, int]:
        """The four of `torch.cuda`."""
        one = self.device
        return (
            torch.cuda.memory_allocated(one),
            torch.cuda.max_memory_allocated(one),
            torch.cuda.memory_reserved(one),
            torch.cuda.max_memory_reserved(one),
        )

    def begin_peaks(self) -> None:
        """`torch.cuda.reset_peak_memory_stats`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def retries(self) -> int:
        """`num_alloc_retries`."""
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
        # Turning it off and on empties the ring of a history before.
        record(enabled=None)
        record(enabled="all", context="alloc", stacks="python", max_entries=1_000_000)
        try:
            yield events
            torch.cuda.synchronize(self.device)
            snapshot = torch.cuda.memory._snapshot()
            events += read_history(snapshot["device_traces"][self.device.index])
        finally:
            record(enabled=None)
