"""How much memory training may take, the limit that sizes are tried under, and how much a try took."""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from batchfinder.devices.catalog import memory_fraction
from batchfinder.errors import InvalidValue
from batchfinder.measure import device_memory, host_limits
from batchfinder.measure.device_memory import CudaMemory, HostMemory, memory_of
from batchfinder.measure.host_limits import status
from batchfinder.measure.trial import TrialSteps, clear, run_trial
from batchfinder.results import Verdict
from batchfinder.units import MIB
from tests.measure.made_up_cuda import TOTAL, MadeUpCuda
from tests.measure.made_up_cuda import cuda as cuda

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="no /proc")

CPU = torch.device("cpu")
# Of this device 9 and 18 GiB are among the limits whose plain quotient comes to a byte less.
LIMITS = (1, 1_000_000_007, 2 << 30, 9 << 30, TOTAL - 1)


@example(total=TOTAL, limit=9 << 30)
@given(total=st.integers(1, 1 << 40), limit=st.integers(0, 1 << 40))
def test_a_fraction_comes_to_its_limit(total: int, limit: int) -> None:
    """To the byte, for any card; more than the card is the card."""
    fraction = memory_fraction(limit, total)
    assert 0.0 <= fraction <= 1.0
    assert int(fraction * total) == min(limit, total)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_set_and_taken_back(device: str, limit: int, cuda: MadeUpCuda) -> None:
    """With a number and without one; what was there before is there again, whole or not, however often."""
    for before in (None, 18 << 30, 1_000_000_009):
        cuda.allowed = before
        memory = CudaMemory(torch.device(device), limit)
        assert memory.allowance_bytes == min(limit, before or TOTAL)
        for _ in range(3):
            with memory.limited(0, 0):
                assert cuda.allowed == min(limit, before or TOTAL)
            assert cuda.allowed == before


@pytest.mark.parametrize("before", [None, 18 << 30, 1_000_000_009])
def test_tries_are_limited_within_what_was_set(before: int | None, cuda: MadeUpCuda) -> None:
    """What there is less the reserve, with room for what is held on top, but never more than before."""
    cuda.allowed = before
    memory = CudaMemory(torch.device("cuda", 0), 1_000_000_000)
    for reserve, held in ((0, 0), (1_000_003, 0), (1_000_003, 5)):
        with memory.limited(reserve, held):
            assert cuda.allowed == 1_000_000_000 - reserve + held
        assert cuda.allowed == before


def test_a_step_that_goes_on_after_an_out_of_memory_does_not_fit(
    cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step itself has caught; what PyTorch's own code has is to be tried again. Nothing is left behind."""
    memory, before = CudaMemory(torch.device("cuda", 0), None), dict(vars(torch.OutOfMemoryError))

    def steps(taken: TrialSteps) -> None:
        for number in range(3):
            with taken.loading():
                pass
            if number in failing:
                cuda.ooms += 1
                cuda.retries = [cuda.retries[0] + 1]
                if by_step:
                    with suppress(RuntimeError):
                        raise torch.OutOfMemoryError("CUDA out of memory.")

    # (in which batches, whether the step caught it, in benchmark mode): in its first batch that tries all algorithms
    for failing, by_step, benchmark, verdict in (
        ((), False, False, Verdict.FITS),
        ((0,), True, False, Verdict.OUT_OF_MEMORY),
        ((1,), True, True, Verdict.OUT_OF_MEMORY),
        ((0,), False, False, Verdict.FELL_BACK),
        ((1,), False, True, Verdict.FELL_BACK),
    ):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
        seen = run_trial(steps, memory, torch.device("cuda", 0))
        assert seen.verdict is verdict, (failing, by_step, benchmark)
        if verdict is Verdict.OUT_OF_MEMORY:
            assert seen.message == "it ran out of memory once, and the step caught the error and went on"
    assert dict(vars(torch.OutOfMemoryError)) == before


def test_a_request_that_failed_all_the_same_is_no_retry(cuda: MadeUpCuda) -> None:
    """So that a try in which cuDNN does with a smaller workspace goes on to its other phases."""
    cuda.retries, cuda.ooms = [3], 2
    assert CudaMemory(torch.device("cuda", 0), None).retries() == 1


def test_in_benchmark_mode_the_cache_may_be_given_back_in_the_first_batch(
    cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which cuDNN tries all algorithms for a shape, and some need all memory there is."""
    memory = CudaMemory(torch.device("cuda", 0), None)

    def steps(taken: TrialSteps) -> None:
        for number in range(3):
            with taken.loading():
                pass
            if number == retried:
                cuda.retries = [cuda.retries[0] + 1]

    for retried, benchmark, fits in ((0, False, False), (0, True, True), (1, True, False)):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
        seen = run_trial(steps, memory, torch.device("cuda", 0))
        assert seen.verdict is (Verdict.FITS if fits else Verdict.THRASHING), (retried, benchmark)


@pytest.mark.parametrize("budget", [1, 64 * MIB])
def test_a_budget_below_what_the_process_holds_is_refused(budget: int) -> None:
    """Before anything is tried, with both figures."""
    with pytest.raises(InvalidValue, match=r"budget: .*'(1 B|64.00 MiB)'; expected more than the \d+\.\d\d MiB that"):
        memory_of(CPU, budget)


@on_linux
def test_a_step_is_judged_by_what_is_resident() -> None:
    """64 MiB more than the limit fail, at the latest as the steps end; 64 MiB less fit, and are the peak."""
    seen, tensors = {}, []
    for size in (64, 192):
        clear(CPU)
        start = status("VmRSS") or 0
        memory = HostMemory(start + 128 * MIB)
        seen[size] = run_trial(lambda check, size=size: tensors.append(torch.ones(size * MIB // 4)), memory, CPU)  # type: ignore[misc]
        tensors.clear()
        peak = seen[size].peak_reserved_bytes
        assert peak is None or abs(peak - start - size * MIB) < 8 * MIB
        if size == 64:
            reserved = run_trial(lambda check: torch.ones(16 * MIB), memory, CPU, reserve_bytes=80 * MIB)
            assert reserved.verdict is Verdict.OUT_OF_MEMORY
    assert [one.verdict for one in seen.values()] == [Verdict.FITS, Verdict.OUT_OF_MEMORY]
    assert "MiB were resident at the peak; the limit is" in seen[192].message


@on_linux
def test_a_budget_ends_where_the_cgroup_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of 4 GiB in a cgroup with 128 MiB left: steps that take more fail, rather than meet the kernel's killer.

    Only root can make a real cgroup; reading nested ones is tested in `test_host_limits.py`.
    """
    held = status("VmRSS") or 0
    monkeypatch.setattr(host_limits, "cgroup", lambda: (held + 128 * MIB, held))
    monkeypatch.setattr(device_memory, "cgroup", host_limits.cgroup)
    memory = HostMemory(4 << 30)
    assert memory.free_bytes() <= held + 136 * MIB  # this process differs by a few MiB from what it held
    assert memory.allowance_bytes == held + 128 * MIB
    assert run_trial(lambda check: torch.ones(16 * MIB), memory, CPU).fits
    assert run_trial(lambda check: torch.ones(48 * MIB), memory, CPU).verdict is Verdict.OUT_OF_MEMORY


@on_linux
def test_address_space_is_not_used_memory() -> None:
    """What is only mapped, such as an arena or a stack, does not count, nor what was resident in an earlier try."""
    memory = HostMemory((status("VmRSS") or 0) + 64 * MIB)
    mapped = mmap.mmap(-1, 1 << 30)
    barrier = threading.Barrier(5)
    threads = [threading.Thread(target=barrier.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not run_trial(lambda check: torch.ones(32 * MIB), memory, CPU).fits
    assert run_trial(lambda check: torch.ones(4 * MIB), memory, CPU).fits
    barrier.wait()
    mapped.close()


@on_linux
def test_what_runs_away_gets_an_allocators_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft RLIMIT_AS stands well above the limit, at least by what threads map, and is gone afterwards."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size, memory = status("VmSize") or 0, HostMemory((status("VmRSS") or 0) + 64 * MIB)
    seen = []

    def steps(check: object) -> None:
        seen.append(resource.getrlimit(resource.RLIMIT_AS)[0] - size)
        torch.empty(1 << 40, dtype=torch.uint8)

    failed = run_trial(steps, memory, CPU)
    assert failed.verdict is Verdict.OUT_OF_MEMORY
    assert "can't allocate memory" in failed.message
    assert 512 * MIB < seen[0] < 1024 * MIB
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    # No more than the machine has.
    monkeypatch.setattr(device_memory, "available_bytes", lambda: 80 * MIB)
    run_trial(steps, memory, CPU)
    assert 48 * MIB < seen[1] - (status("VmSize") or 0) + size < 112 * MIB


@on_linux
def test_where_the_peak_cannot_be_reset_the_limit_stands_at_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old peak is no peak of a try; what needs more than the limit fails at once."""
    monkeypatch.setattr(device_memory, "reset_resident_peak", lambda: False)
    torch.ones(32 * MIB)
    clear(CPU)
    memory = HostMemory((status("VmRSS") or 0) + 64 * MIB)
    fits = run_trial(lambda check: torch.ones(4 * MIB), memory, CPU)
    assert (fits.verdict, fits.peak_reserved_bytes) == (Verdict.FITS, None)
    assert "can't allocate memory" in run_trial(lambda check: torch.ones(20 * MIB), memory, CPU).message


@on_linux
def test_a_limit_of_the_users_holds_less_the_margin() -> None:
    """Under `ulimit -v` a try that maps or touches more than is left, less 6 MiB, fails as it ends.

    It is not stopped there: oneDNN compiles no kernel any more in a thread where one had no memory. Copies that the
    process holds come on top, and the headroom is taken off.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    own = (status("VmSize") or 0) + 256 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (own, before[1]))
    try:
        memory = HostMemory(None)
        assert memory.allowance_bytes == own
        assert memory.free_bytes() <= memory.held_bytes() + own - (status("VmSize") or 0)
        for reserve, held, margin in ((0, 0, 6), (16 * MIB, 0, 22), (16 * MIB, 4 * MIB, 18)):
            for more in (-2, 2):
                left = own - (status("VmSize") or 0) - (margin - more) * MIB
                memory.reset_peak()
                expected = nullcontext() if more < 0 else pytest.raises(MemoryError, match="at the peak")
                with expected, memory.limited(reserve, held):
                    assert resource.getrlimit(resource.RLIMIT_AS)[0] == own
                    torch.ones(left, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


_MAPPED = """
import mmap, resource
from batchfinder.measure.device_memory import HostMemory
from batchfinder.measure.host_limits import status
own = status("VmPeak") + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (own, own))
memory = HostMemory(None)
for margin in (8, 4, 8):
    memory.reset_peak()
    try:
        with memory.limited(0, 0):
            mmap.mmap(-1, own - status("VmSize") - (margin << 20)).close()
        print("fits")
    except MemoryError as error:
        print(error)
"""


@on_linux
@pytest.mark.slow
def test_what_is_mapped_counts_against_a_limit_of_the_users() -> None:
    """Though nothing of it is touched; as long as no try before it has mapped more, which the kernel does not reset."""
    said = subprocess.run(
        [sys.executable, "-c", _MAPPED], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert (said[0], said[2]) == ("fits", "fits")
    assert re.fullmatch(r"[\d.]+ MiB were mapped at the peak; the limit is [\d.]+ MiB", said[1])


@on_linux
def test_a_budget_is_the_whole_processes() -> None:
    """As on a GPU, bytes count those that the process holds already; copies that training will not have come on top."""
    memory = HostMemory(700 * MIB)
    assert (memory.allowance_bytes, memory.free_bytes()) == (700 * MIB, 700 * MIB)
    assert (memory.max_peak_bytes(0), memory.max_peak_bytes(5)) == (700 * MIB, 700 * MIB + 5)
    assert memory.name
    assert Path("/proc/meminfo").exists() == (memory.total_bytes > 0)


CHURN = """
import ctypes, os, torch
from batchfinder.measure.device_memory import HostMemory
from batchfinder.measure.host_limits import status
if os.environ.get("BUDGET"):
    HostMemory(1 << 40)
kept = []
for size in (1, 4, 16, 31):  # each is freed: by itself glibc maps nothing smaller for itself from then on
    torch.ones(size << 18)
start = status("VmRSS")
for _ in range(20):
    freed = torch.ones(6 << 18)
    kept.append(torch.ones(1 << 16))
    del freed
held = [torch.ones(6 << 18) for _ in range(4)]
kept.append(torch.ones(1 << 16))
del held
print((status("VmRSS") - start) >> 20)
"""


@on_linux
@pytest.mark.parametrize(
    ("environment", "returned"),
    [
        pytest.param({}, False, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        ({"BUDGET": "1"}, True),
        pytest.param({"BUDGET": "1", "LD_PRELOAD": ""}, False, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_under_a_budget_freed_memory_is_not_resident(environment: dict[str, str], returned: bool) -> None:
    """Holes in the heap stay resident by glibc's own choice; a malloc that the user has set up is left alone."""
    libc = platform.libc_ver()[0]
    if libc != "glibc":
        pytest.skip(f"the C library is {libc or 'another'}")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", CHURN]
    resident = int(subprocess.check_output(command, env={**inherited, **environment}, text=True))
    assert (resident < 8) == returned, resident
