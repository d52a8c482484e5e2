"""The child process of `measure/child_probe.py`: a process that builds one workload and takes real steps with it.

    {"query_gpu": {"device": "cuda:0"}}          -> {"gpu": {...GpuFacts}} or {"error": ...}
    {"open": {...}}                              -> {"opened": {}} or {"error": ...}
    {"probe": {"batch_size": 8, "seq_len": 64}}  -> {"measurement": {...}}, {"error": ...}, or {"exit": -11}

An error has `"context": "dead"` beside it where nothing more can be done on the GPU by that process.

On the CPU each probe runs in a fork, whose address space is limited: every probe starts from the same slate, its peak
is the kernel's own count, and a crash takes nothing along. CUDA cannot be used in a fork, so there the process itself
takes the steps, and ends after an error that may have killed its context.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchfinder.errors import InvalidValue
from batchfinder.measure import host_limits
from batchfinder.measure.device_memory import CudaMemory, numbered
from batchfinder.measure.trial import Failure, StageReadings, TrialSteps, attempt, clear, run_trial
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.simulator.steady_state import MORE_STEPS
from batchfinder.training.child_process import (
    answer,
    build_with,
    describe,
    end_with_parent,
    pipe,
    read_until_end,
    requests_from,
)
from batchfinder.training.optimizers import InBackward
from batchfinder.training.spec import PEAK_MICRO_BATCHES, PEAK_STEPS, StepConfig
from batchfinder.training.step import Loading, OnStage, Step, Workload
from batchfinder.units import format_bytes


class CudaProbe:
    """Takes real steps on a CUDA device in this process.

    Peaks count all that the process holds on the device, as `torch.cuda` does. Whatever the steps change (weights,
    gradients, optimizer state, random numbers) is the caller's to restore.

    Args:
        steps: takes at least two optimizer steps, given batch size, sequence length, `on_stage`, `more` and `loading`,
            as `Step.run` does.
        device: where they run.
        limit_bytes: bytes the allocator may reserve in all, so that a large card answers for a smaller one; None for
            what the card has.

    Attributes:
        timed_steps: how many steps to time at least, after those.

    Raises:
        InvalidValue: the limit is not positive.
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self,
        steps: Callable[[int, int | None, OnStage, Callable[[], bool], Loading], object],
        device: torch.device,
        limit_bytes: int | None = None,
    ) -> None:
        if limit_bytes is not None and limit_bytes <= 0:
            raise InvalidValue("limit_bytes", limit_bytes, "a positive number of bytes")
        self._steps = steps
        self._device = device
        self._memory = CudaMemory(device, limit_bytes)
        self.timed_steps = 0

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size, from a clean slate.

        Raises whatever the steps raise that is not about the size, unchanged.
        """
        readings = StageReadings(self._memory.held_bytes, lambda: self._memory.peaks()[0] or 0)
        return run_trial(
            lambda taken: self._steps(batch_size, shape.seq_len, readings, taken.goes_on, taken.loading),
            self._memory,
            self._device,
            readings=readings,
            timed_steps=self.timed_steps,
            settling_steps=MORE_STEPS,
        )

    def is_dead(self) -> bool:
        """Whether the device's context is dead: then every call fails, with the error that it died of."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return True
        return False


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """What PyTorch says of a device, as JSON values: the fields of a `GpuFacts`.

    It becomes the process's current device, and gets its context, which is no longer free then.
    """
    device = numbered(device)
    torch.cuda.set_device(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    toolkit = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "free_bytes": free_bytes,
        "compute_capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "versions": {"torch": torch.__version__, **{name: found for name, found in toolkit.items() if found}},
    }


def in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do something in a fork of this process.

    Returns:
        What it returned, `{"error": ...}` for what it raised, or `{"exit": code}` where it died.
    """
    reading, writing = pipe()
    process = os.fork()
    if process == 0:
        own = os.getpid()
        try:
            result = work()
        except BaseException as error:
            result = {"error": describe(error)}
        if os.getpid() != own:  # the user's code has forked and lets both sides go on
            os._exit(0)
        answer(writing, result)
        os._exit(0)
    os.close(writing)
    data, code = read_until_end(reading, process)
    os.close(reading)
    if not data.endswith(b"\n"):
        return {"exit": code}
    answered: dict[str, Any] = json.loads(data)
    return answered


_NO_KERNEL = "No available kernel"
_OTHER_ATTENTION = (
    "sdpa or eager: PyTorch has no flash kernel for this step here; on a GPU it needs compute capability 8.0, half "
    "precision, heads of at most 256 and no mask, on a CPU no dropout in the attention"
)

_MORE = 8
"""Part of the limit that is added to see whether a crash was for want of memory."""


class WorkerState:
    """One workload, built on the CPU and ready to be probed; the arguments are those of `open_workload`."""

    def __init__(
        self, workload: Workload, config: StepConfig, device: torch.device, limit_bytes: int | None, threads: int
    ) -> None:
        self.workload = workload
        self.device = device
        self.limit_bytes = limit_bytes
        self.threads = threads
        self.flash = config.flash
        # At least two optimizer steps, and two micro-batches where training takes more, show the peak.
        micro_batches = min(PEAK_MICRO_BATCHES, config.micro_batches)
        shown = replace(config, steps=max(PEAK_STEPS, config.steps), micro_batches=micro_batches)
        self.step = Step(workload, shown, device)
        if device.type == "cpu":
            model = workload.model.to(dtype=self.step.weights_dtype)
            tensors = [*model.parameters(), *model.buffers()]
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
            self.held_bytes = sum(storages.values())
            clear(device)
        else:
            self.cuda = CudaProbe(self._steps, device, limit_bytes)

    def probe(self, batch_size: int, seq_len: int | None, timed_steps: int = 0) -> dict[str, Any]:
        """Try one size; time so many steps at least, after those that show the peak."""
        if self.device.type != "cpu":
            self.cuda.timed_steps = timed_steps
            return measurement_to_json(self.cuda(batch_size, Shape(seq_len)))
        limit = self.limit_bytes
        if limit is not None and self.held_bytes > limit:
            message = f"the model alone takes {format_bytes(self.held_bytes)} of {format_bytes(limit)}"
            return measurement_to_json(Measurement(Verdict.OUT_OF_MEMORY, message=message))
        seen = in_fork(partial(self.limited, batch_size, seq_len, limit, timed_steps))
        if limit is None or seen.get("exit", -signal.SIGKILL) == -signal.SIGKILL:
            return seen
        # Native code that does not check its allocations crashes at the limit. Does it with a little more, too?
        with_more = in_fork(partial(self.limited, batch_size, seq_len, limit + limit // _MORE))
        if "measurement" not in with_more:
            return seen
        message = f"it crashed (exit code {seen['exit']}) for want of memory: with 1/{_MORE} more it did not"
        return measurement_to_json(Measurement(Verdict.OUT_OF_MEMORY, message=message))

    def limited(
        self, batch_size: int, seq_len: int | None, limit_bytes: int | None, timed_steps: int = 0
    ) -> dict[str, Any]:
        """Take the steps within a limit on model and steps together. The model is left changed: for a fork."""
        torch.set_num_threads(self.threads)
        self._start_threads_and_math_library()
        base_bytes = host_limits.size_bytes() - self.held_bytes
        total = sys.maxsize if limit_bytes is None else base_bytes + limit_bytes
        readings = StageReadings(
            lambda: host_limits.size_bytes() - base_bytes, lambda: host_limits.size_bytes("VmPeak") - base_bytes
        )

        taken = TrialSteps(lambda: 0, timed_steps)

        def steps() -> None:
            # The limit is lifted while the error unwinds: recognising it takes memory too.
            with host_limits.limited_to(total):
                self._steps(batch_size, seq_len, readings, taken.goes_on, taken.loading)

        start = time.perf_counter()
        outcome = attempt(steps, "cpu")
        seconds = time.perf_counter() - start
        if isinstance(outcome, Failure):
            return measurement_to_json(Measurement(outcome.verdict, seconds=seconds, message=outcome.message))
        # What came before the limit may have peaked above it.
        peak = min(host_limits.size_bytes("VmPeak"), total) - base_bytes
        resting, forward = readings.resting_bytes, readings.forward_bytes
        step, micro_batch = taken.seconds()
        seen = Measurement(Verdict.FITS, None, peak, seconds, resting_bytes=resting, forward_bytes=forward)
        return measurement_to_json(replace(seen, step_seconds=step, micro_batch_seconds=micro_batch))

    def _start_threads_and_math_library(self) -> None:
        """Take what a process takes once: stacks of OpenMP's threads, buffers of MKL and oneDNN.

        That differs by machine (measured: 7 MiB with 2 threads, 61 MiB with 8; some 20 MiB with 2 threads on a Xeon
        with AMX), and says nothing of a model.
        """
        dtype = self.step.precision.weights or torch.float32
        rows, images, kernels = (
            torch.ones(shape, dtype=dtype, requires_grad=True)
            for shape in ((256, 256), (self.threads, 8, 32, 32), (8, 8, 3, 3))
        )
        with suppress(RuntimeError):  # a kernel that this CPU lacks is for the step to tell of
            with self.step.precision.context(self.device):
                loss = functional.linear(rows, rows).sum() + functional.conv2d(images, kernels).sum()
            loss.backward()

    def _steps(
        self, batch_size: int, seq_len: int | None, on_stage: OnStage, more: Callable[[], bool], loading: Loading
    ) -> None:
        on_gpu = self.device.type != "cpu"
        if on_gpu:
            # Inside the trial, so that a model too large for the GPU is an out-of-memory like any other.
            self.workload.model.to(self.device, self.step.weights_dtype)
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.flash else nullcontext():
                self.step.run(batch_size, seq_len, on_stage, more, loading)
        except RuntimeError as error:
            if not self.flash or _NO_KERNEL not in str(error):
                raise
            raise InvalidValue("attention", "flash", _OTHER_ATTENTION) from None
        finally:
            if on_gpu:  # in a fork all of it ends with the process
                if isinstance(self.step.optimizer, InBackward):
                    self.step.optimizer.remove()
                self.workload.model.zero_grad(set_to_none=True)
                self.step.optimizer = None


def measurement_to_json(measurement: Measurement) -> dict[str, Any]:
    """A measurement as JSON values, in an answer."""
    return {"measurement": {**asdict(measurement), "verdict": measurement.verdict.name}}


def open_workload(
    builder: str,
    arguments: dict[str, Any],
    config: dict[str, Any],
    device: str,
    limit_bytes: int | None,
    threads: int | None,
) -> WorkerState:
    """Build what is to be probed.

    Args:
        builder: `module:function`, which returns a `Workload`.
        arguments: its keyword arguments.
        config: the fields of a `StepConfig`.
        device: as `torch.device` takes it.
        limit_bytes: what model and steps may take together; None for all there is.
        threads: threads of PyTorch's operators on the CPU; None for PyTorch's own choice.
    """
    threads = threads or torch.get_num_threads()
    if device == "cpu":
        # Load what the first optimizer would (seconds, for `torch._dynamo`), once and outside every limit. One thread
        # only: OpenMP's threads do not survive a fork. And no backward, whose engine does not either.
        torch.set_num_threads(1)
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        torch.optim.AdamW([parameter]).step()
    workload: Workload = build_with(builder, arguments)
    return WorkerState(workload, StepConfig(**config), torch.device(device), limit_bytes, threads)


def main(argv: list[str]) -> int:
    """Serve: request pipe, answer pipe."""
    requests, answers = int(argv[0]), int(argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may have been started by a process that ignores its children
    end_with_parent(requests)
    served: WorkerState | None = None
    for request in requests_from(requests):
        try:
            device = next(iter(request.values())).get("device", "cpu")
            if device != "cpu":
                if not torch.cuda.is_available():
                    built = "" if torch.version.cuda or torch.version.hip else ", which is a build for CPUs alone"
                    expected = f"cpu, or a GPU that PyTorch {torch.__version__} can use here{built}"
                    raise InvalidValue("device", device, expected)
                count = torch.cuda.device_count()
                if (torch.device(device).index or 0) >= count:
                    expected = f"one of {', '.join(f'cuda:{index}' for index in range(count))}"
                    raise InvalidValue("device", device, expected)
            if "query_gpu" in request:
                message: dict[str, Any] = {"gpu": gpu_facts(torch.device(device))}
            elif "open" in request:
                served = open_workload(**request["open"])
                gc.freeze()
                message = {"opened": {}}
            else:
                assert served is not None
                message = served.probe(**request["probe"])
        except Exception as error:
            message = {"error": describe(error)}
            if served is not None and served.device.type != "cpu" and served.cuda.is_dead():
                message["context"] = "dead"
        answer(answers, message)
        if "error" in message and served is not None and served.device.type != "cpu":
            return 0  # it may be in any state; the next probe gets a new process
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
