"""What Linux says of this process's memory: /proc, resource limits and cgroups. Other systems give None."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

if sys.platform != "win32":
    import resource

_SHARE_TO_TAKE = 0.9
_STATUS = Path("/proc/self/status")
_UNLIMITED = 1 << 60
"""A cgroup of version 1 without a limit names the largest multiple of a page in 63 bits."""
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")


def soft_limit(name: str) -> int | None:
    """A soft limit of this process in bytes, such as `RLIMIT_AS`; None where it is unlimited."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def status(field: str, path: Path | None = None) -> int | None:
    """A size in bytes from /proc/self/status, such as `VmRSS`; None where there is no such file or field."""
    try:
        lines = (path or _STATUS).read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{field}:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def meminfo(field: str) -> int | None:
    """A size in bytes from /proc/meminfo, such as `MemAvailable`; None where there is no such file or field."""
    return status(field, Path("/proc/meminfo"))


def size_bytes(field: str = "VmSize") -> int:
    """Bytes mapped now, which is what RLIMIT_AS limits (`VmSize` in proc_pid_status(5)); with `VmPeak` the most ever.

    In a fork `VmPeak` starts at the size its parent had: `dup_mm` in Linux's kernel/fork.c,
    `mm->hiwater_vm = mm->total_vm`.

    Raises:
        OSError: the system does not say.
    """
    found = status(field)
    if found is None:
        raise OSError(f"{_STATUS} has no {field}")
    return found


def reset_resident_peak() -> bool:
    """Let `VmHWM` start again from what is resident now; False where the kernel has no such reset.

    Source: proc_pid_clear_refs(5).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def limited_to(total_bytes: int) -> Iterator[None]:
    """Let no allocation inside make the address space larger than this: it fails as on a full machine.

    A tighter limit that is there already stays. The bytes are all that are mapped, those of before included.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([total_bytes, *ceiling]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def cgroup(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[int | None, int]:
    """The memory limit of this process's cgroup and of all cgroups around it, and what counts as used of it.

    A job of Slurm or systemd-run lies in a cgroup within others, any of which may be limited; see cgroups(7).

    Returns:
        The lowest limit, and so many bytes that the difference of the two is the least that is left in any of the
        cgroups; reclaimable file cache counts as free. (None, 0) without a limit.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/", "0:memory:/"]
    levels: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit_name, used_name, reclaimable = _CGROUP_V1 if controllers else _CGROUP_V2
        mounts = [mount / "memory"] if controllers else [mount, mount / "unified"]
        # In a container the names may be those outside of it, where no such folders are mounted; the root is its own.
        parts = [part.relative_to("/") for part in (PurePosixPath(name), *PurePosixPath(name).parents)]
        for folder in (root / part for part in parts for root in mounts):
            try:
                limit = (folder / limit_name).read_text().strip()
                if limit == "max" or int(limit) >= _UNLIMITED:
                    continue
                used = int((folder / used_name).read_text())
                stat = dict(line.split()[:2] for line in (folder / "memory.stat").read_text().splitlines())
                levels.append((int(limit), max(0, used - int(stat.get(reclaimable, 0)))))
            except (OSError, ValueError):
                continue
    if not levels:
        return None, 0
    lowest = min(limit for limit, _ in levels)
    return lowest, lowest - min(limit - used for limit, used in levels)


def available_bytes() -> int | None:
    """What can be taken without calling the kernel's OOM killer, on this machine and within this process's cgroups."""
    limit, used = cgroup()
    left = [meminfo("MemAvailable"), None if limit is None else limit - used]
    least = min((one for one in left if one is not None), default=None)
    return None if least is None else int(_SHARE_TO_TAKE * least)
