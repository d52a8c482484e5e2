"""The recording process: builds workloads once, and forks for each recording.

A fork keeps the fake device, whose registration cannot be undone, and any crash inside a recording away from the built
workload. Requests and answers are JSON lines (`training.child_process`); what the user's code prints goes to a log.

    {"open": {...WorkloadSpec}}       -> {"facts": {...WorkloadFacts}} or {"error": ...}
    {"record": {...RecordingJob}, "id": 7}
                                      -> {"id": 7, "exit": 0}; the trace, or what a try measured, lies in 7.json
"""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import os
import re
import resource
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchfinder.errors import RecordingFailed, UserCodeFailed
from batchfinder.training.child_process import (
    SILENCE,
    answer,
    build_with,
    busy_ticks,
    describe,
    end_with_parent,
    ended,
    pipe,
    read_until_end,
)
from batchfinder.training.spec import FAKE_DEVICE
from batchfinder.units import format_bytes
from batchfinder.versions import installed

_LOOK_SECONDS = 0.5  # how often recordings are looked at
_OPERATOR_BYTES = 256
_NO_KERNEL = ("prim.", "profiler.")
_OBJECTS_OF_IMPORTS = 50_000
"""New objects after which garbage is looked for while PyTorch is imported and the workload is built.

Nearly all of them stay: by Python's own 700 it took a tenth of the time.
"""
_USED_CUDA = 75
"""The exit code of a fork that was to go on as the server, and cannot."""
_BATCH_SECONDS = 5
"""What a few batches of the user's may take to be made, to see whether lengths make a difference to them."""
# What PyTorch and Python say where memory is not given.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "MemoryError", "bad_alloc", "Cannot allocate memory")


@dataclass
class _Running:
    """A recording under way: its process and number, and the processor time it had used when it was last seen busy."""

    process: int
    number: int
    busy_at: float
    ticks: int | None = None


@dataclass(eq=False)
class RecordingServer:
    """Serves requests until its pipe of requests closes; up to `workers` recordings run at once.

    Traces, operators' names and the log lie in the folder. A recording that uses no processor time for `silent_seconds`
    is ended.
    """

    requests: int
    answers: int
    folder: Path
    workers: int
    silent_seconds: float
    recorder: str = FAKE_DEVICE
    workload: Any = None
    built_in_forks: dict[str, Any] | None = None
    """How to build a workload whose building uses CUDA, as importing bitsandbytes does, which peft imports."""
    not_built: BaseException | None = None
    mode: Any = None
    warnings: list[str] = field(default_factory=list)  # what the user is told of the build
    opened: bool = False
    end: threading.Thread | None = None

    def serve(self) -> None:
        """Answer until the parent hangs up, and wait for what ends this process then."""
        self.end = end_with_parent(self.requests, self.folder)
        self._serve()
        self.end.join()

    def _serve(self) -> None:
        waiting: list[dict[str, Any]] = []
        running: dict[int, _Running] = {}  # by the pipe that closes as a recording ends
        selector = selectors.DefaultSelector()
        selector.register(self.requests, selectors.EVENT_READ)
        buffer = b""
        while True:
            ready = selector.select(_LOOK_SECONDS if running else None)
            now = time.monotonic()
            for done, each in list(running.items()):
                closed = any(key.fd == done for key, _ in ready)
                # A process that it leaves behind may hold its pipe open, so it is looked at as well.
                code = ended(each.process, wait=closed) if closed or not ready else None
                ticks = busy_ticks(each.process) if code is None else None
                if ticks is None or ticks != each.ticks:
                    each.ticks, each.busy_at = ticks, now
                elif now - each.busy_at > self.silent_seconds:
                    os.kill(each.process, signal.SIGKILL)
                    with (self.folder / f"{each.number}.log").open("a") as log:
                        log.write(f"\n{SILENCE.format(self.silent_seconds)}\n")
                    code = ended(each.process, wait=True)
                if code is not None:
                    del running[done]
                    selector.unregister(done)
                    os.close(done)
                    answer(self.answers, {"id": each.number, "exit": code})
            if any(key.fd == self.requests for key, _ in ready):
                chunk = os.read(self.requests, 1 << 16 if self.opened else 1)  # a fork may go on from there
                if not chunk:
                    return
                *lines, buffer = (buffer + chunk).split(b"\n")
                for request in map(json.loads, lines):
                    if "open" in request:
                        self.opened = True
                        self._open(**request["open"])
                    else:
                        waiting.append(request)
            while waiting and len(running) < self.workers:
                request = waiting.pop(0)
                is_built = self.workload is not None or self.built_in_forks is not None
                if is_built and request["record"]["config"]["gpus"] > 1:
                    from batchfinder.recording import distributed

                    distributed.prepare()  # here once, and not in every fork
                adapters = (request["record"]["workload"] or {}).get("arguments", {}).get("lora")
                if adapters and self.workload is not None and self.recorder == FAKE_DEVICE:
                    with suppress(Exception):  # raised again, and told, in the fork
                        import_module("peft")
                done, child_end = pipe()
                process = os.fork()
                if process == 0:
                    os.close(done)
                    os.close(self.answers)  # else nobody would see the server's end before the fork's
                    end_with_parent(self.requests, self.folder)
                    self._record(request["record"], request["id"])
                os.close(child_end)
                running[done] = _Running(process, request["id"], time.monotonic())
                selector.register(done, selectors.EVENT_READ)

    def _open(self, builder: str, arguments: dict[str, Any]) -> None:
        """Build the workload and answer with the facts about it, or with why it could not be built."""
        thresholds, in_a_fork = gc.get_threshold(), False
        adapts = bool(arguments.get("lora") or arguments.get("quantization"))
        gc.set_threshold(_OBJECTS_OF_IMPORTS)
        try:
            import torch

            from batchfinder.recording.fake_device import FakeDeviceMode
            from batchfinder.recording.modules import compiled_modules
            from batchfinder.recording.user_kernels import skip_triton_launches

            # A fork does not have the threads that OpenMP starts for real tensors, and would wait for them.
            torch.set_num_threads(1)
            on_fake_device = self.recorder == FAKE_DEVICE
            if on_fake_device:
                skip_triton_launches()
            else:
                import_module("batchfinder.recording.cuda_build.record_step")  # here once, and not in every fork
            self.mode = FakeDeviceMode(allow_non_fake_inputs=True)
            if not on_fake_device and (adapts or _is_own(builder, arguments)):
                in_a_fork = self._go_on_in_a_fork()
                if not in_a_fork:
                    with suppress(Exception):  # raised again, and told, in the forks
                        import_module("transformers.modeling_utils")  # here once, and not in each of them
                    self.built_in_forks = {"builder": builder, "arguments": arguments}
                    return
            self.workload = self._build(builder, arguments)
            if compiled_modules(self.workload.model) and find_spec("triton") is not None:
                if on_fake_device:  # here once, and not in every fork
                    from batchfinder.recording import inductor

                    inductor.prepare()
                else:
                    import_module("torch._inductor.compile_fx")
            facts = self._facts(self.workload, builder, arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.not_built = error
            answer(self.answers, {"error": describe(error)})
        else:
            answer(self.answers, {"facts": facts})
        finally:
            gc.set_threshold(*thresholds)
        if in_a_fork and (adapts or _used_cuda()):
            os._exit(_USED_CUDA)

    def _go_on_in_a_fork(self) -> bool:
        """Serve from a fork on, in which this returns True. This process waits, and ends as the fork does.

        It returns False in this one where building used CUDA in the fork, whose own forks could not use it then.
        """
        process = os.fork()
        if process == 0:
            self.end = end_with_parent(self.requests, self.folder)
            return True
        code = ended(process, wait=True)
        if code == _USED_CUDA:
            return False
        if code is not None and code < 0:
            os.kill(os.getpid(), -code)
        if code == 0 and self.end is not None:  # the parent has hung up, or the user's code has ended the fork
            self.end.join(1)
        os._exit(code or 0)

    def _facts(self, workload: Any, builder: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The fields of `WorkloadFacts`."""
        import torch

        from batchfinder.models.build import longest_stack
        from batchfinder.models.fingerprint import fingerprint_workload

        side = getattr(workload.make_batch, "side", None)
        return {
            "fingerprint": fingerprint_workload(workload, builder, str(arguments.get("spec", ""))),
            "max_seq_len": workload.max_seq_len,
            "seq_len_unit": "none" if self._has_one_shape(workload, arguments) else workload.seq_len_unit,
            "brings_optimizer": workload.optimizer is not None,
            # The metadata of PyTorch's wheels are without what it is built for.
            "versions": {**installed("torch", "transformers", "pytorch-lightning"), "torch": str(torch.__version__)},
            "warnings": self.warnings,
            "parallelizes": workload.parallelize is not None,
            "recorder": self.recorder,
            "layers": len(longest_stack(workload.model) or ()),
            "side": side if isinstance(side, int) else None,
        }

    def _has_one_shape(self, workload: Any, arguments: dict[str, Any]) -> bool:
        """Whether lengths make no difference to a factory's batches; in a fork, as the user's code may count them."""
        from batchfinder.models.build import is_factory
        from batchfinder.training.step import has_one_shape

        if workload.seq_len_unit != "tokens" or not is_factory(str(arguments.get("spec", ""))):
            return False

        def compare() -> bool:
            with self.mode:
                return has_one_shape(workload)

        return self._in_a_fork(compare, _BATCH_SECONDS).get("result") is True

    def _in_a_fork(self, work: Callable[[], Any], seconds: int = 0) -> dict[str, Any]:
        """What a function returns in a fork, as the `result`, or an `error` as `describe` has it.

        Args:
            seconds: how long it may take; 0 for no limit.
        """
        import torch

        reading, writing = pipe()
        process = os.fork()
        if process == 0:
            own = os.getpid()
            try:
                with suppress(OSError):  # it is closed in the fork of a recording
                    os.close(self.answers)  # else nobody would see the server's end before the fork's
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(seconds)
                torch.set_num_threads(1)  # whatever the user's code has set
                try:
                    said = {"result": work()}
                except BaseException as error:
                    said = {"error": describe(error)}
                if os.getpid() == own:  # else the user's code has forked and lets both sides go on
                    with open(writing, "w") as file:
                        json.dump(said, file, default=repr)
            finally:
                os._exit(0)
        os.close(writing)
        text, code = read_until_end(reading, process)
        os.close(reading)
        if not text:
            return {"error": describe(RecordingFailed(f"the process that was to build the workload ended with {code}"))}
        found: dict[str, Any] = json.loads(text)
        return found

    def _build(self, builder: str, arguments: dict[str, Any]) -> Any:
        """The workload. A factory of the user's builds as on a machine without a GPU, also on the CUDA build."""
        own = self.recorder != FAKE_DEVICE and _is_own(builder, arguments)
        with _without_cuda() if own else nullcontext():
            return self._build_fake(builder, arguments)

    def _build_fake(self, builder: str, arguments: dict[str, Any]) -> Any:
        """The workload, on fake tensors; with real weights where the user's code cannot do without their values.

        Raises:
            RecordingFailed: the real weights take more than the memory that is free.
            UserCodeFailed: the code fails with real weights too.
        """
        try:
            with self.mode:
                return build_with(builder, arguments)
        except UserCodeFailed as failed:
            why = _reads_values(failed.traceback)
        what = arguments.get("spec", builder)
        free = _free_bytes()
        before = resource.getrlimit(resource.RLIMIT_DATA)
        try:
            if free is not None:
                taken = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
                limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
                resource.setrlimit(resource.RLIMIT_DATA, (min([taken + free, *limits]), before[1]))
            workload = build_with(builder, arguments)
        except (MemoryError, UserCodeFailed) as error:
            if isinstance(error, UserCodeFailed) and not any(sign in error.traceback for sign in _NO_MEMORY):
                raise
            raise RecordingFailed(
                f"{what} has to be built with real weights, since {why}. They take more than the "
                f"{format_bytes(free or 0)} of memory that are free here. Build what that line reads without the "
                "weights, or record on a machine with more memory."
            ) from None
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
        said = f"{what} was built with real weights, since {why}"
        self.warnings.append(said)
        return replace(workload, assumptions=(*workload.assumptions, said))

    def _record(self, job: dict[str, Any], number: int) -> None:
        """In the fork: record or try, leave what came of it in a file, and end. Prints have a log of their own."""
        process = os.getpid()
        gc.freeze()  # what was imported is not looked through again
        log = os.open(self.folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # Compiled code that is given a tensor without memory may end the process: here it writes where it was.
        faulthandler.enable((self.folder / f"{number}.crash").open("w"), all_threads=False)
        try:
            import torch

            from batchfinder.training.spec import StepConfig

            torch.set_num_threads(1)  # whatever the user's code has set
            if job["card"]:
                from batchfinder.recording.cuda_build import record_step as cuda_build

                cuda_build.use_card(job["card"])
            elif self.recorder != FAKE_DEVICE:
                from batchfinder.recording.user_kernels import skip_triton_launches

                skip_triton_launches()
            workload, other = self.workload, job["workload"] or self.built_in_forks
            self.warnings.clear()
            if other is not None:
                from batchfinder.models.quantization import with_bitsandbytes

                with with_bitsandbytes() if job["card"] else nullcontext():
                    workload = self._build(other["builder"], other["arguments"])
            elif self.not_built is not None:
                raise self.not_built
            # The operator at work, in a file's memory, where it survives this process.
            operator_file = self.folder / f"{number}.operator"
            operator_file.write_bytes(b" " * _OPERATOR_BYTES)
            with operator_file.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), _OPERATOR_BYTES)

            def on_operator(name: str) -> None:
                if not name.startswith(_NO_KERNEL):
                    memory[:] = name.encode()[:_OPERATOR_BYTES].ljust(_OPERATOR_BYTES)

            config, sizes = StepConfig(**job["config"]), (job["batch_size"], job["seq_len"])
            result: dict[str, Any]
            if job["tried"]:
                measurement, unmodelled = cuda_build.try_step(workload, config, *sizes, self.mode)
                seen = {**asdict(measurement), "verdict": measurement.verdict.name}
                result = {"measurement": seen, "unmodelled": unmodelled}
            elif job["card"]:
                trace = cuda_build.record_step(workload, config, *sizes, self.mode, on_operator)
                result = {"trace": trace.to_json()}
            else:
                from batchfinder.recording.record_step import record_step

                trace = record_step(workload, config, tuple(job["capability"]), *sizes, self.mode, on_operator)
                result = {"trace": trace.to_json()}
            result["warnings"] = self.warnings
        except BaseException as error:
            result = {"error": describe(error)}
        if os.getpid() != process:  # the user's code has forked and lets both sides go on
            os._exit(0)
        partial = self.folder / f"{number}.partial"
        partial.write_text(json.dumps(result, default=repr))
        partial.rename(self.folder / f"{number}.json")
        os._exit(0)


def _is_own(builder: str, arguments: dict[str, Any]) -> bool:
    """Whether a workload is built by a factory of the user's, and not by name."""
    from batchfinder.models.build import is_factory

    return is_factory(str(arguments.get("spec", builder)))


@contextmanager
def _without_cuda() -> Iterator[None]:
    """Have `torch.cuda.is_available()` be False and `torch.cuda.device_count()` 0."""
    import torch

    asked = torch.cuda.is_available, torch.cuda.device_count
    torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
    try:
        yield
    finally:
        torch.cuda.is_available, torch.cuda.device_count = asked


def _used_cuda() -> bool:
    """Whether this process has used CUDA, in PyTorch's own words: its forks cannot."""
    import torch

    process = os.fork()
    if process == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return ended(process, wait=True) != 0


def _reads_values(text: str) -> str:
    """Why code does not run on fake tensors: the last line of the user's own, and what it raised."""
    frames = re.findall(r'^  File "(.+)", line (\d+), in .+\n    (.+)$', text, re.MULTILINE)
    own = [frame for frame in frames if "site-packages" not in frame[0] and os.sep + "torch" + os.sep not in frame[0]]
    raised = " ".join(text.strip().splitlines()[-1].split())[:200]
    if not own:
        return f"its code reads values, which fake tensors do not have ({raised})"
    file, line, code = own[-1]
    return f"{os.path.basename(file)}:{line} ({code.strip()}) does not run on fake tensors ({raised})"


def _free_bytes() -> int | None:
    """What the machine says that it can give, on Linux."""
    try:
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None


def main(argv: list[str]) -> int:
    """Run a server: request pipe, answer pipe, folder, number of workers, seconds of silence, recorder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may have been started by a process that ignores its children
    folder = Path(argv[2])
    RecordingServer(int(argv[0]), int(argv[1]), folder, int(argv[3]), float(argv[4]), argv[5]).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
