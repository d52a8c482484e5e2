"""Real training on this machine's CPU under a memory limit: real allocator errors, a sharp and repeatable answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchfinder.errors import InvalidValue
from batchfinder.probing.process import ProcessProbe
from batchfinder.step.spec import WorkloadSpec

MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "4096",
    "PYTHONMALLOC": "malloc",
}
"""Makes glibc return freed memory to the system, and Python ask glibc for each object. With glibc's defaults the limit
drifts, because freed memory stays in the arenas of threads (measured: a search answered 118, which then failed; with
these, 163 ran and 164 failed every time). Python's own allocator maps 1 MiB at a time, and whether a step needs one
more such arena is chance (measured: peaks of one size 180 KiB apart, and once 1 MiB; with these, 50 KiB).

Source: https://man7.org/linux/man-pages/man3/mallopt.3.html, https://docs.python.org/3/c-api/memory.html
"""


class CpuProbe(ProcessProbe):
    """Takes real steps in forks of a child process, each under RLIMIT_AS.

    The limit counts as a card's memory does: the model's parameters and buffers, gradients, optimizer state,
    activations, and what the step maps besides (stacks of its threads, scratch memory of kernels), but not Python,
    PyTorch and the user's libraries. `peak_reserved_bytes` is the kernel's own high-water mark of the same count
    (`VmPeak`), so a size runs exactly when its peak is within the limit. What PyTorch's CPU allocator hands out is not
    counted, so `peak_allocated_bytes` is None.

    Args:
        spec: how to build the workload in the child.
        settings: the fields of a `StepSettings`.
        limit_bytes: bytes for model and steps.
        threads: threads of PyTorch's operators; None for PyTorch's own choice.
        flash: whether attention must run as the flash kernel.

    Raises:
        InvalidValue: the limit is not positive.
    """

    unmodelled = ("fragmentation of glibc's heap: measured with malloc set to return freed memory at once",)

    def __init__(
        self,
        spec: WorkloadSpec,
        settings: Mapping[str, Any],
        limit_bytes: int,
        threads: int | None = None,
        flash: bool = False,
    ) -> None:
        if limit_bytes <= 0:
            raise InvalidValue("limit_bytes", limit_bytes, "a positive number of bytes")
        # Without a card to be seen, the autograd engine starts no threads that a fork would lose.
        environment = {**MALLOC, "CUDA_VISIBLE_DEVICES": ""}
        super().__init__(spec, settings, "cpu", limit_bytes, threads, environment, flash)
