"""What PyTorch's caching allocator does in a trial's first steps on a GPU, recorded by the allocator itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from batchfinder.simulator.trace import StageMark, Trace, TraceStructure

_SCRATCH_BYTES_OF_A_THREAD = 512


def can_record(device: torch.device) -> bool:
    """Whether the allocator of a device has a history, and the user does not record one, which this would end."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return False
    is_enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return is_enabled is not None and not is_enabled()


def most_scratch(device: torch.device) -> int:
    """Bytes to which the scratch memory of a sum over a batch grows on a device.

    Until all threads have a part of the sum, that goes with the batch.

    Source: `setReduceConfig` and `global_memory_size` in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Reduce.cuh: blocks of 32 x 4 threads with
    four floats each, of which every block has those of its column.
    """
    properties = torch.cuda.get_device_properties(device)
    threads: int = properties.multi_processor_count * properties.max_threads_per_multi_processor
    return _SCRATCH_BYTES_OF_A_THREAD * threads


class AllocatorHistory:
    """Records each allocation and release of a GPU, beside the blocks that are there already.

    A step begins with the batch after the last optimizer's step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._held: list[tuple[int, int]] = []  # the address and the size of each block that is there already
        self._marks: list[StageMark] = []
        self._events: list[Any] = []
        self._first = self._step = self._micro_batch = 0
        self._stepped = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record meanwhile."""
        for segment in torch.cuda.memory._snapshot()["segments"]:
            address = segment["address"]
            for block in segment["blocks"]:
                if segment["device"] == self._device and block["state"] == "active_allocated":
                    self._held.append((address, block["size"]))
                address += block["size"]
        hook = register_optimizer_step_pre_hook(lambda *_: self._optimizer_steps())
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=sys.maxsize)
        try:
            self._first = self._count()
            yield
            self._mark("end")
            self._events = torch.cuda.memory._snapshot()["device_traces"][self._device]
        finally:
            torch.cuda.memory._record_memory_history(None)
            hook.remove()

    def batch_begins(self) -> None:
        """Say that the next batch is about to be made."""
        if self._stepped:
            self._step, self._micro_batch, self._stepped = self._step + 1, 0, False
        elif self._marks:
            self._micro_batch += 1
        self._mark("batch")

    def _optimizer_steps(self) -> None:
        self._stepped = True
        self._mark("optimizer")

    def _count(self) -> int:
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)["allocation"]["all"]
        return int(counts["allocated"] + counts["freed"])

    def _mark(self, stage: str) -> None:
        position = len(self._held) + self._count() - self._first
        self._marks.append(StageMark(position, self._step, stage, self._micro_batch))

    def trace(self, batch_size: int) -> Trace:
        """What was recorded with batches of a size, without names; what was there before comes first."""
        # In the order of their sizes: where the rest lies may change from one trial to the next.
        held = sorted(self._held, key=lambda block: block[1], reverse=True)
        live = {address: number for number, (address, _) in enumerate(held)}
        sizes = [size for _, size in held]
        order = list(range(len(held)))
        streams = [0] * len(held)
        numbers = {0: 0}
        waiting: dict[int, tuple[int, int]] = {}  # blocks that other streams use still: the block, and its release
        completed: list[tuple[int, int]] = []
        for event in self._events:
            action, address = event["action"], event["addr"]
            if action == "alloc":
                live[address] = len(sizes)
                order.append(len(sizes))
                sizes.append(event["size"])
                streams.append(numbers.setdefault(event["stream"], len(numbers)))
            elif action == "free_requested" and address in live:
                block = live.pop(address)
                waiting[address] = block, len(order)
                order.append(~block)
            elif action == "free_completed" and address in waiting:
                block, released = waiting.pop(address)
                if released + 1 < len(order):
                    completed.append((len(order), block))
        completed += [(len(order), block) for block, _ in waiting.values()]
        unknown = ("",) * len(sizes)
        structure = TraceStructure(
            tuple(order),
            tuple(self._marks),
            operators=unknown,
            modules=unknown,
            kinds=unknown,
            streams=tuple(streams) if any(streams) else (),
            free_completed=tuple(sorted(completed)),
        )
        return Trace(batch_size, None, structure, tuple(sizes))
