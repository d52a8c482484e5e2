"""What the system says of this process's limits and memory.

A process's address space: how much there is, how much there was at most, and how much there may be (Linux).
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def soft_limit(name: str) -> int | None:
    """A soft limit of this process; None when there is none.

    Args:
        name: `RLIMIT_AS`, ...
    """
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def status(field: str) -> int | None:
    """A size in bytes from /proc/self/status; None where there is no such file or field.

    Args:
        field: `VmSize`, ...
    """
    return _kib(Path("/proc/self/status"), field)


def meminfo(field: str) -> int | None:
    """A size in bytes from /proc/meminfo; None where there is no such file or field.

    Args:
        field: `MemAvailable`, ...
    """
    return _kib(Path("/proc/meminfo"), field)


def _kib(path: Path, field: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{field}:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def cgroup() -> tuple[int | None, int]:
    """The limit of this process's cgroup and what it uses of it, reclaimable file cache left out."""
    for base, limit_name, used_name in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, used = (base / limit_name).read_text().strip(), int((base / used_name).read_text())
            stat = dict(line.split()[:2] for line in (base / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= 1 << 60:
            return None, 0
        return int(limit), max(0, used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0))))
    return None, 0


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
