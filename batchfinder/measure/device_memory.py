"""How much memory training may take here, how much it took, and a limit to try sizes under.

A search that does not trust small peaks, and knows that each try leaves less room for the next.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from batchfinder.devices.device import memory_fraction
from batchfinder.errors import InvalidValue
from batchfinder.measure.host_limits import cgroup, meminfo, soft_limit, status
from batchfinder.results import Trial
from batchfinder.search import Wrapper
from batchfinder.search.base import S
from batchfinder.units import MIB

SHARE_OF_AVAILABLE = 0.5
"""Of the RAM that is available, for a CPU without any limit: a search must not call the kernel's OOM killer."""

SETTLING_BYTES = 2 * MIB
"""On a CPU, kept for what training has and a rehearsal has not: an iterator, a sampler, what a search leaves."""

_LEFT_TO_THE_KERNEL = 0.9


class Memory(Protocol):
    """A device's memory, counted as a probe counts its peaks.

    Attributes:
        name: the device's name.
        total_bytes: what the device has.
        allowance_bytes: the limit as it was set, whatever is in use now; part of the cache's key.
        enforced: whether a step that takes more than the limit fails; if not, its peak is judged afterwards.
        warms_up: whether the first step in a process takes more than later ones: stacks, code.
    """

    name: str
    total_bytes: int
    allowance_bytes: int
    has_hard_limit: bool
    first_step_overhead: bool

    def free_bytes(self) -> int:
        """What training could take now."""
        ...

    def max_peak_bytes(self, held_bytes: int) -> int:
        """What a peak may come to in `limited`, as `peaks` counts it."""
        ...

    def held_bytes(self) -> int:
        """What the process holds now; the difference of two is what came in between."""
        ...

    def limited(self, reserve_bytes: int, held_bytes: int) -> AbstractContextManager[None]:
        """A context in which a step that takes more than the limit fails.

        Args:
            reserve_bytes: to keep free.
            held_bytes: taken on this device by what training will not have.
        """
        ...

    def record_leak(self, left_bytes: int) -> None:
        """Be told what a try left in the process for good, so that as much stays free for the next new shape.

        Args:
            left_bytes: what the process holds more than before the try.
        """
        ...

    def reset_peak(self) -> None:
        """Start to watch."""
        ...

    def peaks(self) -> tuple[int | None, int | None]:
        """Most bytes allocated and reserved since `reset_peak`; None where it cannot be known."""
        ...

    def retries(self) -> int:
        """How often the allocator had to give everything back to go on, in all."""
        ...


class CudaMemory:
    """A CUDA device, by the caching allocator's own count.

    Args:
        device: which.
        budget: the most the allocator may reserve; None for all there is.
    """

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        self.has_hard_limit = True
        self.first_step_overhead = False
        self.name = torch.cuda.get_device_name(device)
        self.total_bytes = torch.cuda.get_device_properties(device).total_memory
        self.allowance_bytes = min(self._fraction_bytes(), self.total_bytes if budget is None else budget)

    def _fraction(self) -> float:
        return float(torch.cuda.get_per_process_memory_fraction(self._device))

    def _fraction_bytes(self) -> int:
        return round(self._fraction() * self.total_bytes)

    def free_bytes(self) -> int:
        """What the allocator could reserve in all: what it has, and what nobody has."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(self.allowance_bytes, free + torch.cuda.memory_reserved(self._device))

    def max_peak_bytes(self, held_bytes: int) -> int:
        """Peaks count all that the allocator has."""
        return self.free_bytes() + held_bytes

    def held_bytes(self) -> int:
        """Bytes in live blocks."""
        return torch.cuda.memory_allocated(self._device)

    @contextmanager
    def limited(self, reserve_bytes: int, held_bytes: int) -> Iterator[None]:
        """Limit the allocator by its memory fraction."""
        before = self._fraction_bytes()
        self._set_fraction(min(before, self.max_peak_bytes(held_bytes) - reserve_bytes))
        try:
            yield
        finally:
            self._set_fraction(before)

    def _set_fraction(self, limit_bytes: int) -> None:
        fraction = memory_fraction(limit_bytes, self.total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def record_leak(self, left_bytes: int) -> None:
        """The allocator's own blocks are given back after each try."""

    def reset_peak(self) -> None:
        """Start to watch."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> tuple[int | None, int | None]:
        """The allocator's own peaks."""
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)

    def retries(self) -> int:
        """The allocator's `num_alloc_retries`."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


class HostMemory:
    """The memory of this process, as growth from now on.

    The limit is the least of: what is left of the soft RLIMIT_AS and RLIMIT_DATA, of the cgroup's memory.max, of
    `budget`, and of the RAM that is available (half of it where none of the others is set).

    While sizes are tried, a soft RLIMIT_AS stands where the limit ends, so that a step which goes beyond it gets an
    allocator's error and not the kernel's OOM killer. Where the system has no such limit, `has_hard_limit` is False.

    Args:
        budget: the most resident memory the process may have; None for no such limit.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        self.name = platform.processor() or platform.machine()
        self.total_bytes = meminfo("MemTotal") or 0
        set_limits = [
            limit for limit in (soft_limit("RLIMIT_AS"), soft_limit("RLIMIT_DATA"), cgroup()[0], budget) if limit
        ]
        self.allowance_bytes = min([*set_limits, self.total_bytes] if self.total_bytes else set_limits, default=0)
        self.has_hard_limit = sys.platform == "linux" and status("VmSize") is not None
        self.first_step_overhead = True
        self._ceiling = self.held_bytes() + self.free_bytes()
        self._size, self._peak, self._offset = 0, 0, 0
        self._resident: int | None = None
        self._left: int | None = None

    def free_bytes(self) -> int:
        """How far the process may grow."""
        left: list[int] = []
        for limit, used in ((soft_limit("RLIMIT_AS"), status("VmSize")), (soft_limit("RLIMIT_DATA"), status("VmData"))):
            if limit is not None and used is not None:
                left.append(limit - used)
        cgroup_limit, cgroup_used = cgroup()
        if cgroup_limit is not None:
            left.append(cgroup_limit - cgroup_used)
        if self._budget is not None:
            left.append(self._budget - (status("VmRSS") or 0))
        available = meminfo("MemAvailable")
        if available is not None:
            left.append(int(available * (_LEFT_TO_THE_KERNEL if left else SHARE_OF_AVAILABLE)))
        if not left:
            raise InvalidValue("budget", self._budget, "a number of bytes, since this system does not say what is free")
        return max(0, min(left))

    def max_peak_bytes(self, held_bytes: int) -> int:
        """Peaks count what comes on top of what the process is now."""
        return max(0, self._ceiling - SETTLING_BYTES - (self._left or 0) + held_bytes - self.held_bytes())

    def held_bytes(self) -> int:
        """The process's address space."""
        return status("VmSize") or 0

    @contextmanager
    def limited(self, reserve_bytes: int, held_bytes: int) -> Iterator[None]:
        """Limit the address space by the soft RLIMIT_AS, within the hard one."""
        if not self.has_hard_limit:
            yield
            return
        import resource

        before = resource.getrlimit(resource.RLIMIT_AS)
        soft = self.held_bytes() + max(0, self.max_peak_bytes(held_bytes) - reserve_bytes)
        hard = before[1]
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    def record_leak(self, left_bytes: int) -> None:
        """Keep the most that a try left free, the first one aside, which leaves what a process takes once.

        For each new shape oneDNN compiles kernels, and keeps them: 1 to 2 MiB for each convolution that trains.
        Training meets new shapes too, in the last, smaller batch of an epoch and in validation.
        """
        self._left = 0 if self._left is None else max(self._left, left_bytes)

    def reset_peak(self) -> None:
        """Let the kernel forget the highest resident size, where it can; the largest address space it remembers."""
        self._size, self._peak, self._resident = self.held_bytes(), status("VmPeak") or 0, status("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._resident = None

    def peaks(self) -> tuple[int | None, int | None]:
        """How much the process grew at most; the allocator's part of it is not known.

        Where the address space is larger than ever, its growth, which is what the limit counts. Else the growth of the
        resident size, plus what the two differed by when both were known.
        """
        highest, peak = status("VmHWM"), status("VmPeak") or 0
        resident = None if highest is None or self._resident is None else max(0, highest - self._resident)
        if peak > self._peak:
            self._offset = max(0, peak - self._size - (resident or 0))
            return None, peak - self._size
        return None, None if resident is None else resident + self._offset

    def retries(self) -> int:
        """The host's allocator does not try again."""
        return 0


def memory_of(device: torch.device, budget: int | None) -> Memory:
    """The memory of the device that trains.

    Args:
        device: a CUDA device or the CPU.
        budget: the most that may be used, in bytes; None for what there is.
    """
    return CudaMemory(device, budget) if device.type == "cuda" else HostMemory(budget)


RESOLUTION = 64
"""Growth of less than one part in this many of the limit says nothing on a CPU.

The kernel counts resident pages in batches, per thread, and freed memory that the process kept is used again unseen.
"""


def _nothing() -> int:
    return 0


@dataclass(frozen=True)
class CoarsePeaks(Wrapper[S]):
    """Raises peaks for the fit alone: small ones to a floor, and all by what tries have left in the process for good.

    A guess that is too low costs a probe that runs; one that is too high by what the tries before it left costs a
    failure and a bisection, whose every probe leaves more.

    Attributes:
        floor_bytes: the least that a peak counts as.
        lost_bytes: asked after each try, by how much the room for a peak has shrunk since the search began.
    """

    floor_bytes: int
    lost_bytes: Callable[[], int] = _nothing

    def update(self, state: S, trial: Trial) -> S:
        """Pass on, with the peak at least at the floor, and what was lost on top."""
        seen = trial.measurement
        if trial.fits and seen.peak_reserved_bytes is not None:
            peak = max(seen.peak_reserved_bytes, self.floor_bytes) + max(0, self.lost_bytes())
            trial = replace(trial, measurement=replace(seen, peak_reserved_bytes=peak))
        return self.search.update(state, trial)
