"""What the system says of this process's limits and memory."""

from __future__ import annotations

import sys
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
