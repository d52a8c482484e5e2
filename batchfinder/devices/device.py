"""The device a simulation runs on: a GPU of the catalog, a memory budget, or a budget on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchfinder.devices.catalog import Gpu
from batchfinder.errors import InvalidValue
from batchfinder.units import format_bytes

DEFAULT_COMPUTE_CAPABILITY = (8, 0)
"""An A100's: assumed for a budget without a GPU, and for AMD GPUs."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a simulation needs to know of a device.

    Attributes:
        total_bytes: what an out-of-memory message calls the total capacity.
        usable_bytes: what the caching allocator can reserve.
        compute_capability: decides which kernels the recorded step would run.
        assumed_capability: whether that is the default, as no NVIDIA GPU was named.
        context_bytes: what the CUDA context and libraries take beside what is usable; 0 where no card was named.
    """

    name: str
    total_bytes: int
    usable_bytes: int
    compute_capability: tuple[int, int]
    assumed_capability: bool = False
    context_bytes: int = 0

    def with_headroom(self, reserve_bytes: int) -> Device:
        """The same with less of it usable, at least one byte."""
        return replace(self, usable_bytes=max(1, self.usable_bytes - reserve_bytes))


@dataclass(frozen=True, slots=True)
class Card:
    """A device as tables show it.

    Attributes:
        name: as it is shown: an instance's card by the instance's name, a real one by its short name.
        count: how many of it train side by side.
    """

    device: Device
    name: str
    count: int = 1


def device_for(gpu: Gpu) -> Device:
    """A whole card with nothing else on it."""
    capability = gpu.compute_capability
    return Device(
        gpu.name,
        gpu.memory_bytes,
        gpu.usable_bytes,
        capability or DEFAULT_COMPUTE_CAPABILITY,
        assumed_capability=capability is None,
        context_bytes=gpu.context_bytes,
    )


def device_with_budget(budget_bytes: int, gpu: Gpu | None = None) -> Device:
    """A device of which the caching allocator of one process may reserve so many bytes in all.

    It is the limit of `torch.cuda.set_per_process_memory_fraction`: the CUDA context is not counted
    (`CUDACachingAllocator.cpp`: `allowed_memory_maximum`). On a named card the context still has to fit beside it, so
    no more than the card's own usable bytes are given out.

    Args:
        gpu: the card it is a part of; None for no card in particular.

    Raises:
        InvalidValue: the budget is not positive.
    """
    if budget_bytes <= 0:
        raise InvalidValue("budget", budget_bytes, "a positive number of bytes")
    budget = f"{format_bytes(budget_bytes)} budget"
    if gpu is None:
        return Device(budget, budget_bytes, budget_bytes, DEFAULT_COMPUTE_CAPABILITY, assumed_capability=True)
    card = device_for(gpu)
    return replace(
        card,
        name=f"{gpu.name}, {budget}",
        total_bytes=min(budget_bytes, card.total_bytes),
        usable_bytes=min(budget_bytes, card.usable_bytes),
    )


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """The fraction for `torch.cuda.set_per_process_memory_fraction` that comes to a limit to the byte.

    The allocator multiplies the fraction by the card's memory and drops what is no whole byte
    (`DeviceCachingAllocator::setMemoryFraction`). The quotient of the two, rounded down as floating-point numbers often
    are, comes to a byte less, and a segment that just fits is refused.

    Args:
        total_bytes: the real device's total memory, as `torch.cuda.get_device_properties` has it.
    """
    if limit_bytes >= total_bytes:
        return 1.0
    fraction = max(0.0, limit_bytes / total_bytes)
    return math.nextafter(fraction, 1.0) if int(fraction * total_bytes) < limit_bytes else fraction
