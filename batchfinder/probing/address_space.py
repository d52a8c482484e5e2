"""A process's address space: how much there is, how much there was at most, and how much there may be (Linux)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")


def size_bytes() -> int:
    """Bytes mapped now, which is what RLIMIT_AS limits (`VmSize` in proc_pid_status(5))."""
    return _field("VmSize")


def peak_bytes() -> int:
    """Most bytes ever mapped (`VmPeak`). In a fork it starts at the size its parent had.

    Source: `dup_mm` in Linux's kernel/fork.c, `mm->hiwater_vm = mm->total_vm`.
    """
    return _field("VmPeak")


@contextmanager
def limited_to(total_bytes: int) -> Iterator[None]:
    """Let no allocation inside make the address space larger than this: it fails as on a full machine.

    Args:
        total_bytes: bytes mapped in all, those of before included.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([total_bytes, *ceiling]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
