"""The child process that records a workload's steps, and futures of their traces. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from batchfinder.cuda_stub import StubCard, StubSession
from batchfinder.errors import BatchFinderError, RecordingDied, RecordingFailed
from batchfinder.results import Measurement, Verdict
from batchfinder.simulator.trace import Trace
from batchfinder.stub_cards import find_cuda_build, open_session
from batchfinder.training import child_process
from batchfinder.training.child_process import Child, ChildDied, line_of_crash, revive
from batchfinder.training.spec import (
    FAKE_DEVICE,
    RecordingJob,
    WorkloadFacts,
    WorkloadSpec,
    is_cuda_build,
    torch_of,
)

_T = TypeVar("_T")
# A recording is the same with a GPU in the machine as without one. The autograd engine's threads would make a context
# on each GPU but the first, and take memory there.
_NO_CARDS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
# It is recorded in forks, which do not have the threads that OpenMP has started.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# In what PyTorch says when code wants the values of a tensor that has none, as `.numpy()` does.
_NEEDS_VALUES = ("NotImplementedError:", "is not supported for tensor subclasses")


class TriedSize(NamedTuple):
    """What came of a size that was tried, and in words what that leaves out."""

    measurement: Measurement
    unmodelled: tuple[str, ...]


class RecordingClient(contextlib.AbstractContextManager["RecordingClient"]):
    """A process that records one workload's steps.

    Args:
        spec: how to build the workload there.
        workers: recordings at once; the number of cores by default.
        recorder: `fake-device`, or `cuda-build` for PyTorch's CUDA build on the stub.

    Raises:
        CudaStubUnavailable: the CUDA build cannot be had here.

    Example:
        >>> spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": "bert-base"})
        >>> with RecordingClient(spec) as recorder:  # doctest: +SKIP
        ...     trace = recorder.submit(job).result()
    """

    def __init__(self, spec: WorkloadSpec, workers: int | None = None, recorder: str = FAKE_DEVICE) -> None:
        self.spec = spec
        self.recorder = recorder
        self._stub: StubSession | None = None
        if is_cuda_build(recorder):  # each recording has its own card
            self._stub = open_session([StubCard()], build=find_cuda_build(torch_of(recorder)))
        self._lock = threading.Lock()
        self._installed: RecordingClient | None = None
        self._futures: dict[int, tuple[RecordingJob, Future[Any]]] = {}
        self._facts: Future[WorkloadFacts] = Future()
        self._died: RecordingDied | None = None
        self._told: set[str] = set()
        self._next = 0
        with contextlib.ExitStack() as failed:  # there may be no more descriptors, processes, threads or memory
            if self._stub is not None:
                failed.callback(self._stub.close)
            environment = {**_ONE_THREAD, **(_NO_CARDS if self._stub is None else self._stub.variables())}
            folder = child_process.temporary_folder()
            silent = str(child_process.SILENT_SECONDS)
            # On the CUDA build the first step at a size compiles, whatever other processes have compiled: that takes
            # memory of the card.
            own = None if self._stub is not None else os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            environment["TORCHINDUCTOR_CACHE_DIR"] = own or str(folder)
            self._child = Child(
                "batchfinder.recording.server",
                (str(folder), str(workers or os.cpu_count() or 1), silent, recorder),
                environment,
                folder,
            )
            failed.callback(self._child.close)
            self._child.send({"open": asdict(spec)})
            self._reader = threading.Thread(target=self._read_answers, daemon=True)
            self._reader.start()
            failed.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(self) -> WorkloadFacts:
        """What there is to know about the workload; waits until it is built.

        Raises:
            BatchFinderError: it could not be built; the user's own failures are `UserCodeFailed`.
        """
        facts = self._facts.result()
        self._warn(facts.warnings)
        return facts

    def _warn(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text not in self._told:
                self._told.add(text)
                warnings.warn(text, stacklevel=3)

    def submit(self, job: RecordingJob) -> Future[Any]:
        """Ask for a recording, or a try. Several may run at once.

        Returns:
            The `Trace` to come, or of a job that is tried the `TriedSize`. Its `result()` raises `UserCodeFailed`,
            `RecordingFailed` or `RecordingDied`.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._died is not None:
                future.set_exception(self._died)
                return future
            number = self._next
            self._next += 1
            self._futures[number] = (job, future)
        self._child.send({"record": asdict(job), "id": number})
        return future

    def on_installed_pytorch(self) -> RecordingClient:
        """This process; where it runs another PyTorch than the installed one, a process with that, closed with this."""
        if torch_of(self.recorder) is None:
            return self
        if self._installed is None:
            self._installed = RecordingClient(self.spec)
        return self._installed

    def close(self) -> None:
        """End the process and everything it started. Recordings that are still to come fail."""
        self._child.kill()
        self._reader.join()
        self._child.close()
        if self._stub is not None:
            self._stub.close()
        if self._installed is not None:
            self._installed.close()

    def _read_answers(self) -> None:
        """Until the process ends: then everything that was asked of it and has no answer fails."""
        try:
            while True:
                # The first answer is about the workload. After that it may be quiet: there may be nothing to record.
                answer = self._child.receive(None if self._facts.done() else child_process.SILENT_SECONDS)
                if "facts" in answer:
                    _resolve(self._facts, WorkloadFacts(**answer["facts"]))
                    continue
                if "error" in answer:
                    _resolve(self._facts, _revive(answer["error"], self.spec.name))
                    continue
                number, exit_code = answer["id"], answer["exit"]
                with self._lock:
                    job, future = self._futures.pop(number)
                what = f"{(job.workload or self.spec).name} at {job}"
                path = self._child.folder / f"{number}.json"
                try:
                    if path.exists():
                        result = json.loads(path.read_text())
                        path.unlink()
                        self._warn(result.get("warnings", ()))
                        if "error" in result:
                            _resolve(future, _revive(result["error"], what))
                        elif "trace" in result:
                            _resolve(future, Trace.from_json(result["trace"]))
                        else:
                            seen = result["measurement"]
                            measurement = Measurement(**{**seen, "verdict": Verdict[seen["verdict"]]})
                            _resolve(future, TriedSize(measurement, tuple(result["unmodelled"])))
                    else:
                        operator_file = path.with_suffix(".operator")
                        operator = operator_file.read_text().strip() if operator_file.exists() else ""
                        last_words = self._child.last_words(f"{number}.log")
                        crash_file = path.with_suffix(".crash")
                        line = line_of_crash(crash_file.read_text()) if crash_file.exists() else ""
                        _resolve(future, RecordingDied(what, operator, exit_code, last_words, line))
                except Exception as error:
                    _resolve(future, RecordingDied(what, "", exit_code, _unreadable(error)))
        except ChildDied as death:
            died = RecordingDied(self.spec.name, "", death.exit_code, death.last_words)
        except Exception as error:  # whatever it says next would not be understood either
            self._child.kill()
            died = RecordingDied(self.spec.name, "", None, _unreadable(error))
        with self._lock:
            self._died = died
            waiting, self._futures = list(self._futures.values()), {}
        for _, future in waiting:
            _resolve(future, died)
        _resolve(self._facts, died)


def _resolve(future: Future[_T], outcome: _T | BaseException) -> None:
    """Give a future its result or exception, unless it has one or was cancelled."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _unreadable(error: Exception) -> str:
    return f"an answer that cannot be read ({type(error).__name__}: {error})"


def _revive(description: Mapping[str, Any], what: str) -> BatchFinderError:
    """The error that the recording process described: where code asked for values of fake tensors, in our words."""
    message = description["message"]
    if not description["type"] and (
        description["module"].startswith("torch._subclasses") or any(sign in message for sign in _NEEDS_VALUES)
    ):
        line = f"\n{description['line'][:1].upper()}{description['line'][1:]}" if description["line"] else ""
        return RecordingFailed(
            f"recording {what} failed where the code reads values, which fake tensors do not have: {message}{line}\n"
            "Give the model fixed shapes and no decisions on tensors' values there, or measure on a real GPU."
        )
    return revive(description, what)
