"""Tests of batchfinder/recording/forked.py: forks that record, fail, hang, and are not noticed by their parent."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder.recording.forked import NotRecordable, record_in_forks
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure

pytestmark = pytest.mark.filterwarnings("error")  # of threads, where there are some


def trace(batch_size: int) -> Trace:
    """Of one block."""
    structure = TraceStructure((0,), (StageMark(0, -1, "model"),), ("aten.empty",), ("",), ("parameter",))
    return Trace(batch_size, None, structure, (1000 * batch_size,))


def recorded(record: Callable[[int], Trace], batch_sizes: Any = (7, 13), seconds: float = 60.0) -> dict[int, Trace]:
    """Traces by batch size."""
    return record_in_forks(record, batch_sizes, time.monotonic() + seconds)


def in_fork(look: Callable[[], int]) -> int:
    """A number that a fork saw."""

    def record(batch_size: int) -> Trace:
        return trace(look())

    return recorded(record, [7])[7].batch_size


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    """All have been waited for."""

    def children() -> set[str]:
        stats = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
        return {process for stat in stats for process in stat.split()}

    before = children()
    yield
    assert children() <= before


def test_recordings_come_back() -> None:
    """Each from a process of its own, however large."""
    assert recorded(trace) == {7: trace(7), 13: trace(13)}
    processes = {in_fork(os.getpid), in_fork(os.getpid), os.getpid()}
    assert len(processes) == 3

    def large(batch_size: int) -> Trace:
        return Trace(batch_size, None, trace(1).structure, tuple(range(200_000)))

    assert len(recorded(large)[13].sizes) == 200_000


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process that recorded it ended with -9"),
        (lambda: os.abort(), "the process that recorded it ended with -6"),
        (lambda: os._exit(9), "the process that recorded it ended with 9"),
        (lambda: sys.exit("no more"), r"SystemExit: no more at .*test_forked.py:\d+, in <lambda>: .*"),
        (
            lambda: 1 // 0,
            r"ZeroDivisionError: integer division or modulo by zero at .*test_forked.py:\d+, in <lambda>: .*",
        ),
    ],
)
def test_a_fork_that_dies(end: Callable[[], object], reason: str) -> None:
    """Or raises: its end or its error is the message, and the other fork is ended."""

    def record(batch_size: int) -> Trace:
        if batch_size == 13:
            end()
        return trace(batch_size)

    with pytest.raises(NotRecordable) as caught:
        recorded(record)
    assert re.fullmatch(reason, str(caught.value))


def test_a_fork_that_hangs() -> None:
    """A lock that another thread held as the process forked is never released: the deadline ends the fork."""
    lock = threading.Lock()

    def record(batch_size: int) -> Trace:
        lock.acquire()
        return trace(batch_size)

    with lock, pytest.raises(NotRecordable) as caught:
        recorded(record, seconds=0.3)
    assert str(caught.value) == "recording it took longer than the time limit"


def test_an_interrupt() -> None:
    """Ctrl-C ends the forks and propagates."""

    def record(batch_size: int) -> Trace:
        time.sleep(60)
        return trace(batch_size)

    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        recorded(record)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_parent_whose_children_are_reaped_for_it() -> None:
    """With SIGCHLD ignored nobody can wait for them, and their answers count all the same."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert recorded(trace)[13] == trace(13)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_files_of_the_parent(tmp_path: Path) -> None:
    """What they have buffered is written once, and nothing of the fork's, to whatever file."""
    with (tmp_path / "log").open("w") as log:
        log.write("from the parent\n")

        def look() -> int:
            log.write("from the fork\n")
            log.flush()
            return os.write(1, b"from the fork\n")

        assert in_fork(look) == len("from the fork\n")
    assert (tmp_path / "log").read_text() == "from the parent\n"


def test_handlers_of_the_parent() -> None:
    """Do not run in the fork: it ends by SIGTERM, and leaves Ctrl-C to its parent."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *args: seen.append(os.getpid()))
    try:
        assert in_fork(lambda: os.kill(os.getpid(), signal.SIGINT) or 1) == 1
        with pytest.raises(NotRecordable, match="ended with -15"):
            in_fork(lambda: os.kill(os.getpid(), signal.SIGTERM) or 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == []


def test_a_limit_of_the_parents_memory_is_not_the_forks() -> None:
    """The fork needs some memory of its own, and is not what the limit is meant for."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))
    try:
        assert in_fork(lambda: resource.getrlimit(resource.RLIMIT_AS)[0]) == before[1]
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == 1 << 40
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_fork_has_no_cuda_backend() -> None:
    """The entry in PyTorch's table of device guards is gone, here one that stands for CUDA's; the parent keeps it."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[1]
    guards[1] = guards[0]  # the CPU's
    try:
        assert in_fork(lambda: int(guards[1] is None and not torch.cuda.is_available())) == 1
        assert guards[1] == guards[0]
    finally:
        guards[1] = before
