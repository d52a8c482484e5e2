"""How much of a card may be used, for those who share it or plan for a smaller one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchfinder.errors import InvalidValue
from batchfinder.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """The most the caching allocator of one process may take from the device.

    It is the limit that `torch.cuda.set_per_process_memory_fraction` sets: it applies to the bytes the allocator
    reserves; the CUDA context is not counted (`CUDACachingAllocator.cpp`: `allowed_memory_maximum`).

    Attributes:
        limit_bytes: bytes the allocator may reserve in all.
    """

    limit_bytes: int

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise InvalidValue("budget", self.limit_bytes, "a positive number of bytes")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read `12GiB`, `900MiB` or `24GB`.

        Args:
            text: the value of `--budget`.

        Raises:
            InvalidValue: it is not a positive size.
        """
        return cls(parse_bytes(text, option="--budget"))

    def of(self, usable_bytes: int) -> int:
        """Cap what a card has for the allocator.

        Args:
            usable_bytes: what the allocator could get without the budget.
        """
        return min(self.limit_bytes, usable_bytes)

    def __str__(self) -> str:
        return f"{format_bytes(self.limit_bytes)} budget"


def memory_fraction(limit_bytes: int, total_bytes: int) -> float:
    """The fraction for `torch.cuda.set_per_process_memory_fraction` that comes to a limit to the byte.

    The allocator multiplies the fraction by the card's memory and drops what is no whole byte
    (`DeviceCachingAllocator::setMemoryFraction`). The quotient of the two, rounded down as floating-point numbers often
    are, comes to a byte less, and a segment that just fits is refused.

    Args:
        limit_bytes: bytes the allocator may reserve in all.
        total_bytes: the real device's total memory, as `torch.cuda.get_device_properties` has it.

    Returns:
        At most 1.0, and not below 0.0.
    """
    if limit_bytes >= total_bytes:
        return 1.0
    fraction = max(0.0, limit_bytes / total_bytes)
    return math.nextafter(fraction, 1.0) if int(fraction * total_bytes) < limit_bytes else fraction
