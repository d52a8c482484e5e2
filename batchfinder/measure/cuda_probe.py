"""Real training on this process's CUDA device.

Not verified on a card when it was written (there was none): the calls are those of PyTorch's documentation, the logic
is tested with a card that is made up, and `tests/measure/test_cuda.py` holds tests marked `gpu` that are ready to run.
What needs them most: that a fraction set below what is reserved acts on the next allocation, that `num_alloc_retries`
stays 0 on a step that just fits, and that a probe leaves `memory_allocated` where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from batchfinder.devices.device import memory_fraction
from batchfinder.errors import InvalidValue
from batchfinder.measure.cleanup import Failure, attempt, clear
from batchfinder.measure.trial import StageReadings, SteadyStateCheck
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.units import format_bytes


class Card(Protocol):
    """What a probe asks of a device's memory."""

    def limit(self, limit_bytes: int) -> float:
        """Let the allocator reserve no more than this; returns what `restore` needs."""
        ...

    def restore(self, fraction: float) -> None:
        """Undo `limit`."""
        ...

    def synchronize(self) -> None:
        """Wait for the device, and raise what its kernels have failed with."""
        ...

    def clear(self) -> None:
        """Give back what is not in use and begin new peaks."""
        ...

    def retries(self) -> int:
        """How often the allocator has given back its cache to satisfy a request."""
        ...

    def peaks(self) -> tuple[int, int]:
        """Most bytes allocated and reserved since `clear`."""
        ...

    def held(self) -> int:
        """Bytes allocated now."""
        ...


class CudaCard:
    """A CUDA or HIP device, as `torch.cuda` has it.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = numbered(device)
        self._total = torch.cuda.get_device_properties(self.device).total_memory

    def limit(self, limit_bytes: int) -> float:
        """Set the process's share, `torch.cuda.set_per_process_memory_fraction`; at most the whole card."""
        before = float(torch.cuda.get_per_process_memory_fraction(self.device))
        torch.cuda.set_per_process_memory_fraction(memory_fraction(limit_bytes, self._total), self.device)
        return before

    def restore(self, fraction: float) -> None:
        """Set the share of before, to the byte."""
        share = memory_fraction(round(fraction * self._total), self._total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def synchronize(self) -> None:
        """`torch.cuda.synchronize`."""
        torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """`batchfinder.measure.cleanup.clear`."""
        clear(self.device)

    def retries(self) -> int:
        """`num_alloc_retries` of `torch.cuda.memory_stats`."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def peaks(self) -> tuple[int, int]:
        """`max_memory_allocated` and `max_memory_reserved`."""
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def held(self) -> int:
        """`memory_allocated`."""
        return torch.cuda.memory_allocated(self.device)


class CudaProbe:
    """Takes real steps on a CUDA device in this process.

    Peaks count all that the process holds on the device, as `torch.cuda` does. Whatever the steps change (weights,
    gradients, optimizer state, random numbers) is the caller's to restore.

    Args:
        steps: takes at least two optimizer steps at (batch size, sequence length), such as `Step.run`.
        device: where they run.
        limit_bytes: bytes the allocator may reserve in all, so that a large card answers for a smaller one; None for
            what the card has.
        card: the device's memory; `CudaCard(device)` by default.

    Attributes:
        readings: what this try's stages say; for steps that can tell it of them, as `Step.run`'s `on_stage`.
        settling: whether this try is to go on; for steps that can take more, as `Step.run`'s `more`.

    Raises:
        InvalidValue: the limit is not positive.
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self,
        steps: Callable[[int, int | None], object],
        device: torch.device,
        limit_bytes: int | None = None,
        card: Card | None = None,
    ) -> None:
        if limit_bytes is not None and limit_bytes <= 0:
            raise InvalidValue("limit_bytes", limit_bytes, "a positive number of bytes")
        self.steps = steps
        self.device = device
        self.limit_bytes = limit_bytes
        self.card = card or CudaCard(device)
        self.readings = self._new_readings()
        self.settling = SteadyStateCheck(self.card.retries)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size, from a clean slate.

        Raises:
            Exception: whatever the steps raise that is not about the size, unchanged.
        """
        self.card.clear()
        before = None if self.limit_bytes is None else self.card.limit(self.limit_bytes)
        try:
            seen = self._once(batch_size, shape)
        except BaseException:
            # If the context is dead this fails too, and must not take the place of what it died of.
            with suppress(RuntimeError):
                self._restore(before)
            raise
        self._restore(before)
        return seen

    def is_dead(self) -> bool:
        """Whether the device's context is dead: then every call fails, with the error that it died of."""
        try:
            self.card.synchronize()
        except RuntimeError:
            return True
        return False

    def _restore(self, fraction: float | None) -> None:
        if fraction is not None:
            self.card.restore(fraction)

    def _new_readings(self) -> StageReadings:
        return StageReadings(lambda: self.card.held(), lambda: self.card.peaks()[0])

    def _once(self, batch_size: int, shape: Shape) -> Measurement:
        self.readings = self._new_readings()
        self.settling = SteadyStateCheck(self.card.retries)
        start = time.perf_counter()

        def steps() -> None:
            self.steps(batch_size, shape.seq_len)
            self.card.synchronize()  # here, where what a kernel failed with is still this step's failure

        outcome = attempt(steps, self.device.type)
        seconds = time.perf_counter() - start
        allocated, reserved = self.card.peaks()
        message = self.settling.message()
        self.card.clear()
        if isinstance(outcome, Failure):
            return Measurement(outcome.verdict, seconds=seconds, message=outcome.message)
        if message:
            message += f", at {format_bytes(reserved)} reserved"
            return Measurement(Verdict.THRASHING, allocated, reserved, seconds, message)
        resting, forward = self.readings.resting_bytes, self.readings.forward_bytes
        return Measurement(Verdict.FITS, allocated, reserved, seconds, resting_bytes=resting, forward_bytes=forward)


def numbered(device: torch.device) -> torch.device:
    """The device with its number. Without one, `torch.cuda` refuses to set anything on it.

    Args:
        device: a CUDA device; without a number it is the current one.
    """
    return torch.device(device.type, torch.cuda.current_device()) if device.index is None else device


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """What there is to know about a device, as JSON values: the fields of a `GpuFacts`.

    It becomes the process's current device, and gets its context, which is no longer free then.

    Args:
        device: which.
    """
    device = numbered(device)
    torch.cuda.set_device(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    toolkit = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "free_bytes": free_bytes,
        "compute_capability": [properties.major, properties.minor],
        "versions": {"torch": torch.__version__, **{name: found for name, found in toolkit.items() if found}},
    }
