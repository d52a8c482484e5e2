"""The simulated card's memory, and what the allocator raises when it is full, in PyTorch's words."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.errors import InvalidValue, OutOfMemory
from batchfinder.units import GIB, KIB, MIB


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a card has and what of it the allocator may take.

    Attributes:
        total_bytes: what the driver reports.
        usable_bytes: what is left of it for the allocator: without the context, libraries and other processes.
        allowed_bytes: the limit that `torch.cuda.set_per_process_memory_fraction` sets on the allocator; None if unset.

    Raises:
        InvalidValue: more is usable than there is.
    """

    total_bytes: int
    usable_bytes: int
    allowed_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.usable_bytes <= self.total_bytes:
            raise InvalidValue("usable_bytes", self.usable_bytes, f"0 to the card's {self.total_bytes}")

    @property
    def capacity_bytes(self) -> int:
        """The most the allocator can have reserved at one time."""
        return self.usable_bytes if self.allowed_bytes is None else min(self.usable_bytes, self.allowed_bytes)


class SimulatedOutOfMemory(OutOfMemory):
    """The simulated card is full, and stayed so after its cached segments had been released.

    Attributes:
        requested_bytes: what was asked for.
        tried_bytes: the segment that this needed; the figure in the message, as in PyTorch's.
        free_bytes: what the driver would report as free.
        total_bytes: what the driver would report as the card's memory.
        allocated_bytes: bytes in live blocks.
        reserved_bytes: bytes taken from the card.
    """

    def __init__(
        self, requested_bytes: int, tried_bytes: int, memory: DeviceMemory, allocated_bytes: int, reserved_bytes: int
    ) -> None:
        self.requested_bytes = requested_bytes
        self.tried_bytes = tried_bytes
        self.free_bytes = memory.usable_bytes - reserved_bytes
        self.total_bytes = memory.total_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        message = self._message(memory.allowed_bytes)
        super().__init__(None, message)
        self.args = (message,)  # the device's words alone: they may be raised again as torch.OutOfMemoryError

    def _message(self, allowed_bytes: int | None) -> str:
        """The text of `DeviceCachingAllocator::malloc`, with the card called simulated.

        https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDACachingAllocator.cpp. The sentences that other code
        looks for stay whole. The advice names PYTORCH_ALLOC_CONF as torch 2.10 and later do; the double blanks are
        PyTorch's own.
        """
        in_use = format_size(self.total_bytes - self.free_bytes)
        allowed = "" if allowed_bytes is None else f"{format_size(allowed_bytes)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.tried_bytes)}. "
            f"GPU 0 (simulated) has a total capacity of {format_size(self.total_bytes)} "
            f"of which {format_size(self.free_bytes)} is free. "
            f"Including non-PyTorch memory, this process has {in_use} memory in use. {allowed}"
            f"Of the allocated memory {format_size(self.allocated_bytes)} is allocated by PyTorch, "
            f"and {format_size(self.reserved_bytes - self.allocated_bytes)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
            "to avoid fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def format_size(size: int) -> str:
    """Write bytes exactly as PyTorch's messages do: a unit's own size still belongs to the unit below it.

    `c10::CachingAllocator::format_size`, https://github.com/pytorch/pytorch/blob/v2.13.0/c10/core/Allocator.h.
    `batchfinder.units.format_bytes` differs at whole units: 1 GiB is `1024.00 MiB` here, and 512 B is `512 bytes`.
    """
    if size <= KIB:
        return f"{size} bytes"
    for limit, factor, unit in ((MIB, KIB, "KiB"), (GIB, MIB, "MiB")):
        if size <= limit:
            return f"{size / factor:.2f} {unit}"
    return f"{size / GIB:.2f} GiB"
