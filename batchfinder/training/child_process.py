"""A child process that does work for this one: JSON lines over two pipes, and a log for all that it prints.

Both ends are here. The parent starts `python -m <module> <requests> <answers> <arguments>`, sends requests and reads
answers; the child answers. The child, and whatever it started, ends with its parent. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchfinder import errors

_LAST_WORDS_BYTES = 800
_REMOVE_TRIES = 50
_REMOVE_PAUSE_SECONDS = 0.02
# What PyTorch's C++ errors append: where in C++ they were raised, and from where that was called.
_CPP_FRAMES = re.compile(r"\n?^Exception raised from .*", re.MULTILINE | re.DOTALL)


class ChildDied(Exception):
    """The child ended without an answer.

    Attributes:
        exit_code: its exit code, negative for a signal.
        last_words: the end of what it printed.
    """

    def __init__(self, exit_code: int, last_words: str) -> None:
        self.exit_code = exit_code
        self.last_words = last_words
        super().__init__(f"a child process ended with {exit_code}: {last_words}")


class Child(contextlib.AbstractContextManager["Child"]):
    """The parent's end.

    Several threads may send; one at a time may receive.

    Args:
        module: what the child runs; its `main` is given the two pipes' descriptors and `arguments`.
        arguments: further words on its command line.
        environment: variables to set on top of this process's own.
        folder: where its log is written, removed by `close`; a new temporary folder by default.

    Attributes:
        pid: the process's number, which is its process group's as well.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="batchfinder-"))
        self._asked_at = 0
        self._sending = threading.Lock()
        requests, self._requests = os.pipe()
        answers, answers_write = os.pipe()
        self._process = start(
            module, (requests, answers_write), arguments, self.folder / "log", {**os.environ, **(environment or {})}
        )
        os.close(requests)
        os.close(answers_write)
        self.pid = self._process.pid
        self._answers = os.fdopen(answers, "rb")

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            ChildDied: it ended instead, with what it printed since this request; or its answer cannot be read, and it
                was ended for that.
        """
        self._asked_at = 0
        with contextlib.suppress(OSError):
            self._asked_at = (self.folder / "log").stat().st_size
        self.send(request)
        return self.receive()

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request. To a child that has ended nothing is sent: `receive` raises."""
        with self._sending, contextlib.suppress(BrokenPipeError):
            if self._requests >= 0:
                _write_line(self._requests, json.dumps(request))

    def receive(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            ChildDied: it ended instead, or the answer cannot be read, and it was ended for that.
        """
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise ChildDied(self._process.wait(), self.last_words())
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError as error:
            self.kill()
            words = f"an answer that cannot be read ({type(error).__name__}: {error})\n{self.last_words()}"
            raise ChildDied(self._process.wait(), words.strip()) from error
        return message

    def last_words(self, log: str = "log") -> str:
        """The end of what was printed since the last `ask`, or of another log in the folder."""
        with contextlib.suppress(OSError), (self.folder / log).open("rb") as file:
            start = self._asked_at if log == "log" else 0
            file.seek(max(start, os.fstat(file.fileno()).st_size - _LAST_WORDS_BYTES))
            return file.read().decode(errors="replace").strip()
        return ""

    def kill(self) -> None:
        """End the process and everything it started, and wait for it; a thread that receives gets `ChildDied`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the process and everything it started, and remove its folder. No thread may be receiving."""
        self.kill()
        with self._sending:
            requests, self._requests = self._requests, -1
        if requests >= 0:
            os.close(requests)
        self._answers.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def start(
    module: str, descriptors: tuple[int, int], arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a child, in a session of its own.

    Its ends of the pipes of requests and answers stand first on its command line; all that it prints goes to the log.
    """
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, descriptors), *arguments],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )


def revive(description: Mapping[str, Any], what: str) -> errors.BatchFinderError:
    """The error that a child described with `describe`; `what` was being done, for the message."""
    if not description["type"]:
        return errors.UserCodeFailed(what, description["traceback"])
    kind = getattr(errors, description["type"])
    error: errors.BatchFinderError = kind.__new__(kind)
    Exception.__init__(error, description["message"])
    error.__dict__.update(description["fields"])
    return error


def end_with_parent(requests: int, folder: Path | None = None) -> threading.Thread:
    """In the child: kill its process group as soon as the parent's end of the pipe of requests is closed.

    The thread that is returned waits for it, so that a busy child ends too, however its parent ended. A folder is
    removed once the process group has ended.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(requests, 0)  # hang-ups are always reported
        poll.poll()
        if folder is None:
            os.killpg(os.getpgrp(), signal.SIGKILL)
            return
        # The folder goes last, from a fork outside the group: once the group is gone, nothing is left to write there.
        group = os.getpgrp()
        try:
            if os.fork():
                return
            os.setsid()
        except OSError:  # no more processes allowed: remove it from this one, before the kill
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        for _ in range(_REMOVE_TRIES):  # killed processes take a moment to end
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(_REMOVE_PAUSE_SECONDS)
        os._exit(0)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def requests_from(requests: int) -> Iterator[dict[str, Any]]:
    """In the child: each request in turn, until the parent hangs up."""
    with os.fdopen(requests, "rb", closefd=False) as stream:
        for line in stream:
            yield json.loads(line)


def answer(answers: int, message: Mapping[str, Any]) -> None:
    """In the child: send one answer."""
    _write_line(answers, json.dumps(message, default=repr))


def _write_line(descriptor: int, text: str) -> None:
    data = text.encode() + b"\n"
    # A signal that arrives while the pipe is full ends a write before all is written.
    while data:
        data = data[os.write(descriptor, data) :]


def describe(error: BaseException) -> dict[str, Any]:
    """In the child: an exception as JSON values, for `revive`.

    An error of ours keeps its type, text and fields; any other one its text, the module of its class, and a traceback
    without batchfinder's and PyTorch's frames.
    """
    kind = type(error)
    message = _CPP_FRAMES.sub("", str(error))
    # A user's class may be derived from one of ours, or have its name.
    if kind.__module__ == errors.__name__ and getattr(errors, kind.__name__, None) is kind:
        fields = {
            n: _CPP_FRAMES.sub("", value) if isinstance(value, str) else value for n, value in vars(error).items()
        }
        return {"type": kind.__name__, "message": message, "fields": fields}
    inner = [Path(__file__).resolve().parent.parent]
    if (torch := sys.modules.get("torch")) is not None and torch.__file__:
        inner.append(Path(torch.__file__).resolve().parent)
    folders = tuple(f"{folder}{os.sep}" for folder in inner)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(folders)]
    text = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    return {
        "type": "",
        "message": f"{kind.__name__}: {message}",
        "module": kind.__module__,
        "traceback": _CPP_FRAMES.sub("", "".join([*text, *traceback.format_exception_only(error)])),
    }
