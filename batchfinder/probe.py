"""The seam between deciding and measuring: a probe says whether a size runs, and with what peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from batchfinder.results import Measurement, Shape, Verdict


class Probe(Protocol):
    """Something that can say whether a batch size runs.

    Attributes:
        source: where its answers come from: `simulated` or `measured`.
        unmodelled: what its answers leave out, in words; empty for a real device.
    """

    @property
    def source(self) -> str: ...

    @property
    def unmodelled(self) -> tuple[str, ...]: ...

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size.

        Returns:
            What was measured. Running out of memory is a verdict; an error in the user's code propagates.
        """
        ...


@dataclass(eq=False)
class FunctionProbe:
    """A probe made of a memory curve, for tests and for planning from a formula of one's own.

    Args:
        peak_bytes: bytes needed at a batch size and sequence length.
        capacity_bytes: bytes the device has; a size fits when its peak is at most this.

    Example:
        >>> probe = FunctionProbe(lambda batch_size, shape: 100 + 7 * batch_size, capacity_bytes=200)
        >>> probe(14, Shape()).fits, probe(15, Shape()).fits
        (True, False)
    """

    peak_bytes: Callable[[int, Shape], int]
    capacity_bytes: int
    source: ClassVar[str] = "simulated"
    unmodelled: ClassVar[tuple[str, ...]] = ()

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        peak = self.peak_bytes(batch_size, shape)
        if peak <= self.capacity_bytes:
            return Measurement(Verdict.FITS, peak, peak)
        return Measurement(Verdict.OUT_OF_MEMORY, message=f"needs {peak} bytes of {self.capacity_bytes}")
