"""How much memory training may take on a host, and what a try leaves of it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch

from batchfinder.measure.device_memory import SETTLING_BYTES, HostMemory
from batchfinder.measure.trial import tried
from batchfinder.results import Verdict
from batchfinder.snapshot.training_state import TrainingState
from batchfinder.units import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no RLIMIT_AS")

CPU = torch.device("cpu")


def room(memory: HostMemory) -> int:
    """The room of a process that held none since."""
    return memory.max_peak_bytes(memory.held_bytes())


def test_room_is_kept_for_what_the_next_new_shape_leaves_behind() -> None:
    """As much as the most that any try left, but for the first, which leaves what a process takes once."""
    memory = HostMemory(None)
    whole = room(memory)
    kept = []
    for left in (9 * MIB, 2 * MIB, -MIB, 3 * MIB, MIB):
        memory.record_leak(left)
        kept.append(whole - room(memory))
    assert kept == [0, 2 * MIB, 2 * MIB, 3 * MIB, 3 * MIB]
    assert SETTLING_BYTES > 0


def test_a_try_tells_the_memory_what_it_left() -> None:
    """What stays mapped when everything is put back and cleared."""
    memory, kept = HostMemory(None), []
    net = torch.nn.Linear(1, 1)
    state = TrainingState.capture(net)
    whole = room(memory)
    assert tried(lambda settling: None, state, memory, CPU).verdict is Verdict.FITS
    # More than glibc's heap ever serves itself: 32 MiB, whatever this process has freed before.
    assert tried(lambda settling: kept.append(torch.empty(64 * MIB, dtype=torch.uint8)), state, memory, CPU).fits
    left = whole - room(memory)
    assert 56 * MIB < left < 80 * MIB  # the heap may shrink, and a thread leave its stack


def test_steps_that_fail_under_the_limit_leave_this_thread_as_it_was() -> None:
    """The limit holds for the steps in their thread, and is gone after them."""
    memory, before = HostMemory(None), resource.getrlimit(resource.RLIMIT_AS)
    state = TrainingState.capture(torch.nn.Linear(1, 1))
    seen = []

    def steps(settling: object) -> None:
        with memory.limited(memory.max_peak_bytes(0) - 64 * MIB, 0):
            seen.append(resource.getrlimit(resource.RLIMIT_AS)[0])
            torch.empty(1 << 40, dtype=torch.uint8)

    assert tried(steps, state, memory, CPU).verdict is Verdict.OUT_OF_MEMORY
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    assert seen[0] < pages * resource.getpagesize() + 128 * MIB
    assert resource.getrlimit(resource.RLIMIT_AS) == before
