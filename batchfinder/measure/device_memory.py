"""A device's memory: how much training may take, a limit to try sizes under, and how much a try took."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from batchfinder.devices.catalog import memory_fraction
from batchfinder.devices.detect import host_name
from batchfinder.errors import InvalidValue
from batchfinder.measure.host_limits import available_bytes, cgroup, meminfo, reset_resident_peak, soft_limit, status
from batchfinder.simulator.alloc_conf import VARIABLES
from batchfinder.units import MIB, format_bytes

if sys.platform != "win32":
    import resource

_EXPANDED_BYTES = 32 * MIB
"""More than a free block in an emptied cache has as a rule, so that a segment has to be extended for it."""

SHARE_OF_AVAILABLE = 0.5
"""Of the RAM that is available, for a CPU without any limit: other programs want some as well."""

_ULIMIT_MARGIN_BYTES = 6 * MIB
"""Of a ulimit, kept for what training maps and a try does not: an iterator, a sampler, and the kernels that are made
for sizes that no try has seen, such as an epoch's last batch (1 to 4 MiB have been seen)."""

_GUARD_BYTES = 512 * MIB
"""How far above the limit of a CPU the address space may grow at least: mapped, but for the most part not resident, are
the stacks of new threads, their arenas (64 MiB each in glibc) and holes in the heap."""


_ULIMITS = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}
"""Limits that a user may have set, and what of /proc/self/status counts against each."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_HEAP_BYTES = 256 * 1024
"""From which size on glibc is to map a request by itself, under a budget, so that freeing it returns the memory.

By default that size grows with what was freed, up to 32 MiB, and the same steps take more or less from one process, and
from one step, to the next (measured beyond what the process held: 90 samples of a BERT of 2 layers 409 to 505 MiB, and
308 with this; 200 of a convolutional net 316 to 454 MiB, and 254). The price is that the kernel clears each page anew:
steps took 20 to 50 % more time of one core.
"""


class CudaMemory:
    """A CUDA or HIP device, by the caching allocator's own count.

    All figures are bytes that this process holds in all, on the device.

    Args:
        device: which; without a number, the current one.
        budget: the most the allocator may reserve, in bytes, so that a large card answers for a smaller one; None for
            all there is.

    Attributes:
        allowance_bytes: the limit as it was set, whatever is in use now; it is part of the cache's key.
    """

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = numbered(device)
        self.name = torch.cuda.get_device_name(self._device)
        self.total_bytes = torch.cuda.get_device_properties(self._device).total_memory
        fraction = float(torch.cuda.get_per_process_memory_fraction(self._device))
        budget = self.total_bytes if budget is None else budget
        self.allowance_bytes = min(round(fraction * self.total_bytes), budget)

    def free_bytes(self) -> int:
        """What training could hold now: what the process holds already, and what is free."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(self.allowance_bytes, free + torch.cuda.memory_reserved(self._device))

    def max_peak_bytes(self, held_bytes: int) -> int:
        """What a peak may come to in `limited`, where so many bytes are held by what training will not have."""
        return self.free_bytes() + held_bytes

    def held_bytes(self) -> int:
        """What the process holds now; the difference of two is what came in between."""
        return torch.cuda.memory_allocated(self._device)

    @contextmanager
    def limited(self, reserve_bytes: int, held_bytes: int) -> Iterator[None]:
        """A context in which steps whose peak exceeds `max_peak_bytes(held_bytes) - reserve_bytes` fail.

        The allocator raises its out-of-memory error: by itself where the card ends there, else being limited by
        `torch.cuda.set_per_process_memory_fraction`, whose value of before is put back. Under such a limit an
        expandable segment is refused what would only extend it, so that it is set where it is needed alone.
        """
        free, _ = torch.cuda.mem_get_info(self._device)
        if reserve_bytes <= held_bytes and free + torch.cuda.memory_reserved(self._device) <= self.allowance_bytes:
            yield
            return
        before = round(float(torch.cuda.get_per_process_memory_fraction(self._device)) * self.total_bytes)
        limit = min(before, self.max_peak_bytes(held_bytes) - reserve_bytes)
        torch.cuda.set_per_process_memory_fraction(memory_fraction(limit, self.total_bytes), self._device)
        before_fraction = memory_fraction(before, self.total_bytes)
        try:
            yield
        except BaseException:
            # A dead context refuses this too, which must not take the place of what it died of.
            with suppress(RuntimeError):
                torch.cuda.set_per_process_memory_fraction(before_fraction, self._device)
            raise
        torch.cuda.set_per_process_memory_fraction(before_fraction, self._device)

    def reset_peak(self) -> None:
        """Start new peaks."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> tuple[int | None, int | None]:
        """Most bytes allocated and reserved since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)

    def retries(self) -> int:
        """How often the allocator satisfied a request by giving its cache back, since the process began.

        Without the requests that failed all the same, of which cuDNN catches those for its workspaces.
        """
        stats = torch.cuda.memory_stats(self._device)
        return int(stats.get("num_alloc_retries", 0)) - int(stats.get("num_ooms", 0))


class HostMemory:
    """The memory of this process, for training on a CPU: best effort, judged by what is resident.

    It answers as `CudaMemory` does.

    The limit is the least of `budget` and of what the process holds plus what the machine and the process's cgroups
    have left (half of that where there is neither a budget nor another limit). Steps whose resident peak (`VmHWM`)
    exceeds it fail as they end. Address space does not count: the arenas of new threads and holes in the heap are
    mapped and take no memory.

    Under a budget glibc is set, for good, to map what is larger than `_HEAP_BYTES` by itself, so that a size takes the
    same memory in each try and in training; not where the user has set it up (`MALLOC_MMAP_THRESHOLD_`, its place in
    `GLIBC_TUNABLES`) or has loaded another malloc (`LD_PRELOAD`).

    A soft RLIMIT_AS stands well above the limit meanwhile, so that steps which run away get an allocator's error and
    not the kernel's OOM killer. Of one that the user has set (`ulimit -v`) `_ULIMIT_MARGIN_BYTES` are kept: steps that
    come nearer fail as they end. They are not stopped there, since oneDNN compiles no kernel any more in a thread where
    one had no memory.

    Where the kernel cannot reset the resident peak, RLIMIT_AS stands at the limit itself; where there is no /proc,
    nothing is enforced. For exact answers, try sizes in a child process (`CpuProbe`).

    Args:
        budget: the most resident memory the process may have, in bytes; None for no such limit.

    Raises:
        InvalidValue: nothing says how much there is, and no budget was given.
    """

    def __init__(self, budget: int | None) -> None:
        self._budget = budget
        self.name = host_name()
        self.total_bytes = meminfo("MemTotal") or 0
        limits = (soft_limit("RLIMIT_AS"), soft_limit("RLIMIT_DATA"), cgroup()[0], budget, self.total_bytes)
        self.allowance_bytes = min((limit for limit in limits if limit), default=0)
        self._limit_bytes = self._resident_limit()
        self._can_reset = reset_resident_peak()
        self._peak_before: int | None = None
        own = os.environ.get("GLIBC_TUNABLES", "").count("mmap_threshold")
        if budget is not None and not own and not {"MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD"} & os.environ.keys():
            try:
                mallopt = ctypes.CDLL(None).mallopt
            except (AttributeError, OSError, TypeError):  # not glibc
                return
            for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
                mallopt(option, _HEAP_BYTES)

    def free_bytes(self) -> int:
        """The limit as it is now, and what ulimits leave."""
        return self._within_ulimits(self._resident_limit())

    def max_peak_bytes(self, held_bytes: int) -> int:
        """The limit as it was when this object was made; what a ulimit leaves is asked each time."""
        return max(0, self._within_ulimits(self._limit_bytes) + held_bytes)

    def held_bytes(self) -> int:
        return status("VmRSS") or 0

    @contextmanager
    def limited(self, reserve_bytes: int, held_bytes: int) -> Iterator[None]:
        """Fail steps by their resident peak, as the context ends, or where they reach RLIMIT_AS."""
        if sys.platform == "win32":  # it has neither a limit nor a resident peak to read
            yield
            return
        limit = self._limit_bytes + held_bytes - reserve_bytes
        before, size, mapped_before = resource.getrlimit(resource.RLIMIT_AS), status("VmSize"), status("VmPeak")
        soft, hard = before
        guarded = sys.platform == "linux" and size is not None
        most_mapped = None  # by a limit of the user's
        if guarded:
            room, more = max(0, limit - self.held_bytes()), 0
            if soft != resource.RLIM_INFINITY:
                most_mapped = max(0, soft - _ULIMIT_MARGIN_BYTES + held_bytes - reserve_bytes)
            if self._can_reset:
                limit = min(limit, self._within_ulimits(self._limit_bytes) + held_bytes - reserve_bytes)
                more, available = max(room, _GUARD_BYTES), available_bytes()
                if available is not None:
                    more = max(0, min(more, available - room))
            guards = [(size or 0) + room + more]
            if most_mapped is not None:
                guards.append(max(soft, most_mapped) if self._can_reset else most_mapped)
            if hard != resource.RLIM_INFINITY:
                guards.append(hard)
            resource.setrlimit(resource.RLIMIT_AS, (min(guards), hard))
        try:
            yield
        finally:
            if guarded:
                resource.setrlimit(resource.RLIMIT_AS, before)
        peak, mapped = self.peaks()[1], status("VmPeak")
        if peak is not None and peak > limit:
            raise MemoryError(f"{format_bytes(peak)} were resident at the peak; the limit is {format_bytes(limit)}")
        # The kernel does not reset VmPeak: it is the peak of these steps where they have raised it.
        if most_mapped is not None and mapped is not None and mapped != mapped_before and mapped > most_mapped:
            limit = most_mapped
            raise MemoryError(f"{format_bytes(mapped)} were mapped at the peak; the limit is {format_bytes(limit)}")

    def reset_peak(self) -> None:
        self._can_reset = reset_resident_peak()
        self._peak_before = None if self._can_reset else status("VmHWM")

    def peaks(self) -> tuple[int | None, int | None]:
        """The resident peak (`VmHWM`), as the peak reserved; what of it the allocator handed out is not known."""
        peak = status("VmHWM")
        hidden = peak is not None and self._peak_before is not None and peak <= self._peak_before
        return None, None if hidden else peak

    def retries(self) -> int:
        return 0  # the host's allocator does not try again

    def _resident_limit(self) -> int:
        """What may be resident in all, ulimits aside."""
        limits = [] if self._budget is None else [self._budget]
        available = available_bytes()
        if available is not None:
            ulimits = [name for name in _ULIMITS if soft_limit(name) is not None]
            bounded = limits or cgroup()[0] is not None or ulimits
            limits.append(self.held_bytes() + (available if bounded else int(SHARE_OF_AVAILABLE * available)))
        if not limits:
            raise InvalidValue("budget", self._budget, "a number of bytes, since this system does not say what is free")
        return min(limits)

    def _within_ulimits(self, limit_bytes: int) -> int:
        """The limit, or less where the soft RLIMIT_AS or RLIMIT_DATA leaves less."""
        for name, field in _ULIMITS.items():
            limit, used = soft_limit(name), status(field)
            if limit is not None and used is not None:
                left = max(0, limit - used - _ULIMIT_MARGIN_BYTES)
                limit_bytes = min(limit_bytes, self.held_bytes() + left)
        return max(0, limit_bytes)


Memory = CudaMemory | HostMemory


SEGMENTS_EXPAND = (
    "samples differ in length, so from here on the allocator's segments are expandable "
    "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): its cache falls into fewer pieces, and larger batches fit. "
    "Set the variable yourself to decide it."
)
"""To say where `expand_segments` has done so."""


def expand_segments(device: torch.device) -> bool:
    """Have the allocator extend its segments from now on (`expandable_segments:True`), and say whether it does.

    Where the user has configured it, and where there are no such segments, it stays as it is. The environment says so
    too afterwards: results in a cache are kept apart by it.
    """
    now = getattr(torch._C, "_accelerator_getAllocatorSettings", str)()  # since torch 2.12
    configured = now or any(os.environ.get(name) for name in VARIABLES)
    if configured or sys.platform != "linux" or torch.version.hip is not None:
        return False
    setting = "expandable_segments:True"
    # Older versions of PyTorch have the second alone, and newer ones warn of it.
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    configure = configure or torch.cuda.memory._set_allocator_settings
    torch.cuda.empty_cache()
    configure(setting)
    try:
        torch.empty(_EXPANDED_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError:  # not with this driver
        configure("expandable_segments:False")
        return False
    os.environ[VARIABLES[-1]] = setting
    return True


def memory_of(device: torch.device, budget: int | None) -> Memory:
    """The memory of the device that trains, a CUDA device or the CPU; `budget` is the most that may be used of it.

    Raises:
        InvalidValue: the process holds as much as the budget already, or nothing says how much there is.
    """
    memory: Memory = CudaMemory(device, budget) if device.type == "cuda" else HostMemory(budget)
    held = memory.held_bytes()
    if budget is not None and budget <= held:
        expected = f"more than the {format_bytes(held)} that this process holds on it already"
        raise InvalidValue("budget", format_bytes(budget), expected)
    return memory


def numbered(device: torch.device) -> torch.device:
    """The device with its number; without one it is the current one. `torch.cuda` sets a fraction by number alone."""
    return torch.device(device.type, torch.cuda.current_device()) if device.index is None else device
