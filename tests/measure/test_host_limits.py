from __future__ import annotations

import mmap
import os
import resource

import pytest

from batchfinder.measure import host_limits

MIB = 1 << 20


def _in_fork(work):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, repr(work()).encode())
        os._exit(0)
    os.close(writing)
    os.wait()
    with os.fdopen(reading) as stream:
        return stream.read()


def test_the_peak_of_a_fork_is_its_own():
    """A fork's high-water mark starts at the size its parent has now, not at the parent's own peak."""
    held = mmap.mmap(-1, 64 * MIB)
    held.close()
    assert host_limits.size_bytes("VmPeak") >= host_limits.size_bytes() + 32 * MIB

    def grow():
        start = host_limits.size_bytes()
        first = host_limits.size_bytes("VmPeak") - start
        mapped = mmap.mmap(-1, 16 * MIB)
        mapped.close()
        return first < MIB and 16 * MIB <= host_limits.size_bytes("VmPeak") - start < 17 * MIB

    assert _in_fork(grow) == "True"


def test_the_limit_holds_inside_and_is_lifted_after():
    """Within the limit memory can be mapped, beyond it not, and afterwards the process is as it was."""

    def work():
        before = resource.getrlimit(resource.RLIMIT_AS)
        with host_limits.limited_to(host_limits.size_bytes() + 8 * MIB):
            mmap.mmap(-1, 4 * MIB).close()
            try:
                mmap.mmap(-1, 16 * MIB)
            except OSError as error:
                refused = error.errno
        mmap.mmap(-1, 16 * MIB).close()
        return refused == 12 and resource.getrlimit(resource.RLIMIT_AS) == before

    assert _in_fork(work) == "True"


def test_a_limit_that_is_there_already_is_kept():
    """A process under a tighter limit of its own is not given more."""

    def work():
        own = host_limits.size_bytes() + 8 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (own, resource.RLIM_INFINITY))
        with host_limits.limited_to(1 << 40):
            return resource.getrlimit(resource.RLIMIT_AS)[0] == own

    assert _in_fork(work) == "True"


def test_a_system_without_the_figures(monkeypatch, tmp_path):
    """Where the kernel tells no size, it says which figure is missing."""
    (tmp_path / "status").write_text("Name:\tpython\n")
    monkeypatch.setattr(host_limits, "_STATUS", tmp_path / "status")
    with pytest.raises(OSError, match="has no VmSize"):
        host_limits.size_bytes()


V2 = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
V1 = "11:cpu,cpuacct:/docker/ab\n9:memory:/slurm/uid_1/job_7/step_0\n0::/other\n"


def cgroups(folder, membership, **levels):
    """A tree of cgroups: a limit, what is used and what of it is reclaimable, by a path with dots for slashes."""
    (folder / "membership").write_text(membership)
    for path, (limit, used, cached) in levels.items():
        level = folder / "mount" / path.replace("__", "/")
        level.mkdir(parents=True, exist_ok=True)
        first = path.startswith("memory")
        (level / ("memory.limit_in_bytes" if first else "memory.max")).write_text(f"{limit}\n")
        (level / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{used}\n")
        inactive = "inactive_file 1\ntotal_inactive_file" if first else "file 999\ninactive_file"
        (level / "memory.stat").write_text(f"anon 5\n{inactive} {cached}\n")
    return host_limits.cgroup(folder / "membership", folder / "mount")


@pytest.mark.parametrize(
    ("membership", "levels", "expected"),
    [
        # Slurm: the job is limited, its step's tasks are not.
        (
            V2,
            {
                "system.slice__slurmstepd.scope__job_7": (1500, 900, 100),
                "system.slice__slurmstepd.scope__job_7__step_0__user__task_0": ("max", 600, 0),
            },
            (1500, 800),
        ),
        # The innermost has the lowest limit, but others in the job leave less.
        (
            V2,
            {
                "system.slice__slurmstepd.scope__job_7": (1500, 1400, 0),
                "system.slice__slurmstepd.scope__job_7__step_0": (1000, 100, 50),
            },
            (1000, 900),
        ),
        # Version 1, in a hybrid tree; no limit is a very large number.
        (
            V1,
            {
                "memory__slurm__uid_1": (2000, 300, 100),
                "memory__slurm__uid_1__job_7__step_0": (9223372036854771712, 300, 0),
                "memory": (9223372036854771712, 10**12, 0),
            },
            (2000, 200),
        ),
        # In a container the names are those outside of it, and the root is its own.
        (V1, {"memory": (500, 80, 30)}, (500, 50)),
        ("0::/\n", {".": (500, 80, 30)}, (500, 50)),
        ("0::/../other\n", {".": (500, 80, 30)}, (500, 50)),
        ("9:memory:/\n0::/init.scope\n", {"unified__init.scope": (700, 80, 30)}, (700, 50)),
        (V2, {"system.slice": ("max", 10, 0)}, (None, 0)),
        (V2, {"elsewhere": (5, 1, 0)}, (None, 0)),
        ("", {}, (None, 0)),
    ],
)
def test_limits_of_all_cgroups_around_the_process_count(tmp_path, membership, levels, expected):
    """The lowest limit, and what is left where the least is."""
    assert cgroups(tmp_path, membership, **levels) == expected


def test_a_system_without_cgroups(tmp_path):
    """There is no limit where there is no such file."""
    assert host_limits.cgroup(tmp_path / "none", tmp_path) == (None, 0)


def test_what_is_available_is_a_share_of_the_least(monkeypatch):
    """Of the machine's free memory and of what the cgroups leave; nothing where the system does not say."""
    monkeypatch.setattr(host_limits, "meminfo", lambda field: 1000)
    monkeypatch.setattr(host_limits, "cgroup", lambda: (800, 300))
    assert host_limits.available_bytes() == 450
    monkeypatch.setattr(host_limits, "cgroup", lambda: (None, 0))
    assert host_limits.available_bytes() == 900
    monkeypatch.setattr(host_limits, "meminfo", lambda field: None)
    assert host_limits.available_bytes() is None
