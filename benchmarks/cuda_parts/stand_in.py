"""For dry runs: a pretended card on the CPU, whose memory is what real CPU tensors take, put through our allocator.

It shows that the measuring functions run and read what they should. Its figures say nothing of a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.measure.cleanup import clear
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.training.workload import Workload
from batchfinder.units import GIB
from benchmarks.cuda_parts.history import Event

TOTAL_BYTES = 8 * GIB


class StandIn(TorchDispatchMode):
    """Counts the storages that operators make while it watches.

    Attributes:
        device: the CPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device("cpu")
        self._paused = False
        self._events: list[Event] | None = None
        self._live: dict[int, tuple[Block | None, weakref.ref[Any]]] = {}
        self._allocator = CachingAllocator(DeviceMemory(TOTAL_BYTES, TOTAL_BYTES))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._paused:
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return output

    def clear(self) -> None:
        """A new card: whatever is still alive is counted no more."""
        clear(self.device)
        self._live.clear()
        self._allocator = CachingAllocator(self._allocator.memory)

    def limit(self, limit_bytes: int | None) -> None:
        """As a memory fraction does; the card must be new."""
        self._allocator = CachingAllocator(DeviceMemory(TOTAL_BYTES, TOTAL_BYTES, limit_bytes))

    def watching(self) -> AbstractContextManager[Any]:
        """The mode itself."""
        return self

    def adapt(self, workload: Workload) -> Workload:
        """Batches are made on the host, and do not count; their copies on the card do, by `move` of the step."""

        def make_batch(batch_size: int, seq_len: int | None) -> Any:
            self._paused = True
            try:
                return workload.make_batch(batch_size, seq_len)
            finally:
                self._paused = False

        return replace(workload, make_batch=make_batch)

    def move(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Copies in the place of the model's tensors."""
        model._apply(lambda tensor: tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone())

    def counters(self) -> tuple[int, int, int, int]:
        """Of the allocator."""
        allocator = self._allocator
        return allocator.allocated, allocator.max_allocated, allocator.reserved, allocator.max_reserved

    def begin_peaks(self) -> None:
        """Of the allocator."""
        self._allocator.reset_peak()

    def retries(self) -> int:
        """Of the allocator."""
        return self._allocator.num_alloc_retries

    def outside_bytes(self) -> int | None:
        """There is no card."""
        return None

    @contextmanager
    def history(self) -> Iterator[list[Event]]:
        """Allocations and releases, with the operator for the line of Python, and segments."""
        self._events = events = []
        self._allocator.watch_segments(
            lambda action, address, nbytes: events.append((f"segment_{action}", nbytes, address, ""))
        )
        try:
            yield events
        finally:
            self._events = None

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        identity, nbytes = storage._cdata, storage.nbytes()
        if identity in self._live:
            return
        try:
            block = self._allocator.allocate(nbytes)
        except SimulatedOutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None
        if block is not None:
            self._note("alloc", nbytes, block)
        allocator = self._allocator

        def released(_: Any) -> None:
            self._live.pop(identity, None)
            if block is not None and allocator is self._allocator:
                self._note("free_completed", block.requested, block)
                allocator.free(block)

        self._live[identity] = block, weakref.ref(storage, released)

    def _note(self, action: str, nbytes: int, block: Block) -> None:
        if self._events is not None:
            self._events.append((action, nbytes, block.address, ""))
