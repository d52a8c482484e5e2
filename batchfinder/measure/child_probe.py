"""Real training in a child process: it survives crashes, kills and dead contexts, and on a CPU gives exact answers.

One child per workload and settings, started when first asked and again when it has died; `measure/worker.py` is its
child's side. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from batchfinder.errors import ContextDied, InvalidValue, UserCodeFailed
from batchfinder.measure.oom import decode
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.retry import retrying
from batchfinder.training.child_process import Child, ChildDied, revive
from batchfinder.training.spec import StepConfig, WorkloadSpec

WORKER = "batchfinder.measure.worker"


@dataclass(frozen=True)
class GpuFacts:
    """A GPU as PyTorch sees it; `free_bytes` are those for the allocator of a process that has its context already."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    versions: dict[str, str] = field(default_factory=dict)
    multiprocessors: int = 0


def query_gpu(device: str, child: Child | None = None) -> GpuFacts:
    """Ask PyTorch for a GPU, in a child that has opened nothing yet; without one, in a process that ends then.

    Raises:
        InvalidValue: there is no such GPU, or PyTorch cannot use it.
        UserCodeFailed: PyTorch raised, as it does where another process has the GPU for itself.
    """
    try:
        with Child(WORKER) if child is None else nullcontext(child) as asked:
            answer = asked.ask({"query_gpu": {"device": device}})
    except ChildDied as death:
        expected = f"a GPU that PyTorch can use; the process that asked for it ended with {death.exit_code}"
        raise InvalidValue("device", device, f"{expected}: {death.last_words or 'it printed nothing'}") from death
    if "error" in answer:
        raise revive(answer["error"], f"asking for {device}")
    facts = answer["gpu"]
    return GpuFacts(**{**facts, "compute_capability": tuple(facts["compute_capability"])})


class ChildProcessProbe(AbstractContextManager["ChildProcessProbe"]):
    """A probe whose steps are taken by a child process.

    A death, of the process or of the GPU's context, is believed when it comes twice. Errors of the user's code are
    raised here as `UserCodeFailed`.

    Args:
        spec: how to build the workload there.
        config: how a step is taken; raised to what shows the peak (`WorkerState` of the worker).
        device: as `torch.device` takes it.
        limit_bytes: what model and steps may take together; None for all there is.
        threads: threads of PyTorch's operators on the CPU; None for PyTorch's own choice.
        environment: variables to set for the child.

    Attributes:
        limit_bytes: as it was given; may be changed until the first probe.
        timed_steps: how many steps a probe times at least, after those that show the peak.
        on_try: called with each size as it is about to be tried.

    Example:
        >>> spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": "bert-base"})  # doctest: +SKIP
        >>> with ChildProcessProbe(spec, StepConfig(), "cuda:0") as probe:  # doctest: +SKIP
        ...     probe(8, Shape(128)).fits
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self,
        spec: WorkloadSpec,
        config: StepConfig,
        device: str,
        limit_bytes: int | None = None,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.limit_bytes = limit_bytes
        self.timed_steps = 0
        self.on_try: Callable[[int], object] = lambda batch_size: None
        self.device = device
        self._open = {
            "builder": spec.builder,
            "arguments": spec.arguments,
            "config": asdict(config),
            "device": device,
            "threads": threads,
        }
        self._environment = {"PYTHONUNBUFFERED": "1", **(environment or {})}
        self._child: Child | None = None
        self._opened = False

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size in the child.

        Raises:
            UserCodeFailed: the user's code raised, while the workload was built or in a step.
            ContextDied: twice, the user's code left the GPU's context dead behind it.
            ProbeDied: the child died twice in a way that says nothing about memory.
        """
        self.on_try(batch_size)
        what = f"{self.spec.name} at batch size {batch_size}"
        if shape.seq_len is not None:
            what += f", sequence length {shape.seq_len}"
        try:
            return retrying((ChildDied, ContextDied), attempts=2, wait=0.0)(self._once)(batch_size, shape, what)
        except ChildDied as death:
            return decode(death, what, self.device.partition(":")[0])

    def query_gpu(self) -> GpuFacts:
        """Ask for the GPU in the child that then takes the steps: what is free as they begin.

        Raises: as the function `query_gpu` does.
        """
        self.close()
        self._child = Child(WORKER, environment=self._environment)
        return query_gpu(self.device, self._child)

    def close(self) -> None:
        """End the child and everything it started."""
        if self._child is not None:
            self._child.close()
            self._child = None
        self._opened = False

    def _once(self, batch_size: int, shape: Shape, what: str) -> Measurement:
        if self._child is None:
            self._child = Child(WORKER, environment=self._environment)
        child = self._child
        timed = {"timed_steps": self.timed_steps} if self.timed_steps else {}
        requests: list[dict[str, Any]] = [{"probe": {"batch_size": batch_size, "seq_len": shape.seq_len, **timed}}]
        if not self._opened:
            requests.insert(0, {"open": {**self._open, "limit_bytes": self.limit_bytes}})
        for request in requests:
            try:
                answer = child.ask(request)
            except ChildDied:
                self.close()
                raise
            if "exit" in answer:  # of the fork that took the steps; the child itself lives
                raise ChildDied(answer["exit"], child.last_words())
            if "error" in answer:
                if "open" in request or self.device != "cpu":
                    self.close()
                error = revive(answer["error"], self.spec.name if "open" in request else what)
                if answer.get("context") == "dead" and isinstance(error, UserCodeFailed):
                    raise ContextDied(error.what, error.traceback)
                raise error
            self._opened = True
        measurement = answer["measurement"]
        return Measurement(**{**measurement, "verdict": Verdict[measurement["verdict"]]})


MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "4096",
    "PYTHONMALLOC": "malloc",
}
"""Environment in which glibc returns freed memory to the system, and Python asks glibc for each object.

With glibc's defaults the limit drifts, because freed memory stays in the arenas of threads (measured: a search answered
118, which then failed; with these, 163 ran and 164 failed every time). Python's own allocator maps 1 MiB at a time, and
whether a step needs one more such arena is chance (measured: peaks of one size 180 KiB apart, and once 1 MiB; with
these, 50 KiB).

Source: https://man7.org/linux/man-pages/man3/mallopt.3.html, https://docs.python.org/3/c-api/memory.html
"""


class CpuProbe(ChildProcessProbe):
    """Takes real steps in forks of a child process, each under RLIMIT_AS.

    The limit counts as a GPU's memory does: the model's parameters and buffers, gradients, optimizer state,
    activations, and what the step maps besides, such as scratch memory of kernels, but not Python, PyTorch, its threads
    and the user's libraries: each fork has started its threads and the math library before its limit is set.
    `peak_reserved_bytes` is the kernel's own high-water mark of the same count (`VmPeak`), so a size runs exactly when
    its peak is within the limit. What PyTorch's CPU allocator hands out is not counted, so `peak_allocated_bytes` is
    None.

    Raises:
        InvalidValue: the limit is not positive.
    """

    unmodelled = ("fragmentation of glibc's heap: measured with malloc set to return freed memory at once",)

    def __init__(self, spec: WorkloadSpec, config: StepConfig, limit_bytes: int, threads: int | None = None) -> None:
        if limit_bytes <= 0:
            raise InvalidValue("limit_bytes", limit_bytes, "a positive number of bytes")
        # Without a GPU to be seen, the autograd engine starts no threads that a fork would lose.
        environment = {**MALLOC, "CUDA_VISIBLE_DEVICES": ""}
        super().__init__(spec, config, "cpu", limit_bytes, threads, environment)
