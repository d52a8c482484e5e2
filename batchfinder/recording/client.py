"""The near end of the recording process: asks for recordings and turns failures into clear errors.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from batchfinder import errors
from batchfinder.simulator.trace import Trace
from batchfinder.training import child_process
from batchfinder.training.spec import RecordingJob, WorkloadFacts, WorkloadSpec

_LAST_WORDS = 800
_T = TypeVar("_T")
# A recording is the same with a GPU in the machine as without one. The autograd engine's threads would make a context
# on each GPU but the first, and take memory there.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
# In what PyTorch says when code wants the values of a tensor that has none, as `.numpy()` does.
_NEEDS_VALUES = ("NotImplementedError:", "is not supported for tensor subclasses")


class RecordingClient:
    """A process that records one workload's steps on the pretend GPU.

    Args:
        spec: how to build the workload there.
        workers: recordings at once; the number of cores by default.

    Example:
        >>> spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": "bert-base"})
        >>> with RecordingClient(spec) as recorder:  # doctest: +SKIP
        ...     trace = recorder.submit(job).result()
    """

    def __init__(self, spec: WorkloadSpec, workers: int | None = None) -> None:
        self.spec = spec
        self._folder = Path(tempfile.mkdtemp(prefix="batchfinder-"))
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._futures: dict[int, tuple[RecordingJob, Future[Trace]]] = {}
        self._facts: Future[WorkloadFacts] = Future()
        self._died: errors.RecordingDied | None = None
        self._next = 0
        requests_read, self._requests = os.pipe()
        answers, answers_write = os.pipe()
        self._process = child_process.start(
            "batchfinder.recording.server",
            (requests_read, answers_write),
            (str(self._folder), str(workers or os.cpu_count() or 1)),
            self._folder / "log",
            {"TORCHINDUCTOR_CACHE_DIR": str(self._folder), **os.environ, **_NO_GPU},
        )
        os.close(requests_read)
        os.close(answers_write)
        self._send({"open": {"builder": spec.builder, "arguments": spec.arguments, "fingerprint": spec.fingerprint}})
        self._reader = threading.Thread(target=self._read, args=(answers,), daemon=True)
        self._reader.start()

    def __enter__(self) -> RecordingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def facts(self) -> WorkloadFacts:
        """What there is to know about the workload; waits until it is built.

        Raises:
            BatchFinderError: it could not be built; the user's own failures are `UserCodeFailed`.
        """
        return self._facts.result()

    def submit(self, job: RecordingJob) -> Future[Trace]:
        """Ask for a recording. Several may run at once.

        Returns:
            The trace to come. Its `result()` raises `UserCodeFailed`, `RecordingFailed` or `RecordingDied`.
        """
        future: Future[Trace] = Future()
        with self._lock:
            if self._died is not None:
                future.set_exception(self._died)
                return future
            number = self._next
            self._next += 1
            self._futures[number] = (job, future)
        self._send({"record": job.to_json(), "id": number})
        return future

    def close(self) -> None:
        """End the process and everything it started. Recordings that are still to come fail."""
        with self._sending:
            requests, self._requests = self._requests, -1
        if requests >= 0:
            os.close(requests)
        self._kill()
        self._reader.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, request: dict[str, Any]) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError):
            if self._requests >= 0:
                os.write(self._requests, json.dumps(request).encode() + b"\n")

    def _read(self, answers: int) -> None:
        what = _what(self.spec)
        try:
            with os.fdopen(answers, "rb") as stream:
                for line in stream:
                    self._take(json.loads(line))
        except Exception as error:
            # Whatever it says next would be no better understood.
            what = _unreadable(what, error)
            self._kill()
        finally:
            self._abandon(what)

    def _take(self, answer: dict[str, Any]) -> None:
        if "facts" in answer:
            _settle(self._facts, WorkloadFacts(**answer["facts"]))
        elif "error" in answer:
            _settle(self._facts, revive(answer["error"], _what(self.spec)))
        else:
            self._finish(answer["id"], answer["exit"])

    def _finish(self, number: int, exit_code: int) -> None:
        with self._lock:
            job, future = self._futures.pop(number)
        what = f"{_what(job.workload or self.spec)} at {job}"
        try:
            _settle(future, self._result(number, what, exit_code))
        except Exception as error:
            _settle(future, errors.RecordingDied(_unreadable(what, error), "", exit_code))

    def _result(self, number: int, what: str, exit_code: int) -> Trace | errors.BatchFinderError:
        path = self._folder / f"{number}.json"
        if not path.exists():
            operator_file = self._folder / f"{number}.operator"
            operator = operator_file.read_text().strip() if operator_file.exists() else ""
            return errors.RecordingDied(what, operator, exit_code, self._last_words(f"{number}.log"))
        result = json.loads(path.read_text())
        path.unlink()
        if "error" in result:
            return revive(result["error"], what)
        return Trace.from_json(result["trace"])

    def _abandon(self, what: str) -> None:
        """The process has ended: whatever was asked of it will not come."""
        self._process.wait()
        died = errors.RecordingDied(what, "", self._process.returncode, self._last_words())
        with self._lock:
            self._died = died
            waiting, self._futures = list(self._futures.values()), {}
        for _, future in waiting:
            _settle(future, died)
        _settle(self._facts, died)

    def _last_words(self, name: str = "log") -> str:
        log = self._folder / name
        return log.read_text(errors="replace")[-_LAST_WORDS:].strip() if log.exists() else ""


def _what(spec: WorkloadSpec) -> str:
    return str(spec.arguments.get("spec", spec.builder))


def _settle(future: Future[_T], outcome: _T | BaseException) -> None:
    """Give a future its result or exception, unless it has one or was cancelled."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _unreadable(what: str, error: Exception) -> str:
    return f"{what} gave an answer that cannot be read ({type(error).__name__}: {error}) and"


def revive(description: dict[str, Any], what: str) -> errors.BatchFinderError:
    """The error that the recording process described.

    Args:
        description: as `server.describe` makes it.
        what: what was being done, for the message.
    """
    if description["type"]:
        kind = getattr(errors, description["type"])
        error: errors.BatchFinderError = kind.__new__(kind)
        Exception.__init__(error, description["message"])
        error.__dict__.update(description["fields"])
        return error
    message = description["message"]
    if description["module"].startswith("torch._subclasses") or any(sign in message for sign in _NEEDS_VALUES):
        return errors.RecordingFailed(
            f"recording {what} met something that has no meaning without values: {message}\n"
            "Give the model fixed shapes and no decisions on tensors' values, or measure on a real GPU."
        )
    return errors.UserCodeFailed(what, description["traceback"])
