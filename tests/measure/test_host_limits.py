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
    assert host_limits.peak_bytes() >= host_limits.size_bytes() + 32 * MIB

    def grow():
        start = host_limits.size_bytes()
        first = host_limits.peak_bytes() - start
        mapped = mmap.mmap(-1, 16 * MIB)
        mapped.close()
        return first < MIB and 16 * MIB <= host_limits.peak_bytes() - start < 17 * MIB

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
