"""A process that does work for this one: lines of JSON over two pipes of their own, and a log for all that is printed.

Both ends are here. The near end starts `python -m <module> <requests> <answers> <arguments>`, asks and waits; the far
end answers. The child, and whatever it started, ends with its parent. Nothing here imports torch.
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
from types import TracebackType
from typing import Any

from batchfinder import errors

_LAST_WORDS = 800
_REMOVING_TRIES = 50
_REMOVING_PAUSE_SECONDS = 0.02
# Where PyTorch's C++ errors go on to tell where in C++ they were raised, and from where that was called.
_CPP_FRAMES = re.compile(r"\n?^Exception raised from .*", re.MULTILINE | re.DOTALL)


class ChildDied(Exception):
    """The child ended without an answer.

    Attributes:
        exit_code: its exit code, negative for a signal.
        last_words: the end of what it printed since it was last asked.
    """

    def __init__(self, exit_code: int, last_words: str) -> None:
        self.exit_code = exit_code
        self.last_words = last_words
        super().__init__(f"a child process ended with {exit_code}: {last_words}")


class Child:
    """The near end.

    Args:
        module: what the child runs; its `main` is given the two pipes' descriptors and `arguments`.
        arguments: further words on its command line.
        environment: variables to set on top of this process's own.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="batchfinder-"))
        self._asked_at = 0
        requests, self._requests = os.pipe()
        answers, answers_write = os.pipe()
        self._process = start(
            module, (requests, answers_write), arguments, self._folder / "log", {**os.environ, **(environment or {})}
        )
        os.close(requests)
        os.close(answers_write)
        self._answers = os.fdopen(answers, "rb")

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's number, which is its process group's as well."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            ChildDied: it ended instead, or what it answered cannot be read, and it was ended for that.
        """
        self._asked_at = self._log_size()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            self._process.wait()
            raise ChildDied(self._process.returncode, self.last_words())
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            self._kill()
            words = f"what it answered cannot be read ({type(error).__name__}: {error})\n{self.last_words()}"
            raise ChildDied(self._process.returncode, words.strip()) from error
        return answer

    def last_words(self) -> str:
        """The end of what was printed since the last request."""
        with contextlib.suppress(OSError), (self._folder / "log").open("rb") as log:
            log.seek(max(self._asked_at, self._log_size() - _LAST_WORDS))
            return log.read().decode(errors="replace").strip()
        return ""

    def close(self) -> None:
        """End the process and everything it started."""
        with contextlib.suppress(OSError):
            os.close(self._requests)
        self._kill()
        self._answers.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _log_size(self) -> int:
        with contextlib.suppress(OSError):
            return (self._folder / "log").stat().st_size
        return 0


def start(
    module: str, descriptors: tuple[int, int], arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a child, in a session of its own.

    Args:
        module: what it runs.
        descriptors: the ends of the pipes of requests and answers that are the child's; first on its command line.
        arguments: further words on its command line.
        log: where all that is printed goes.
        environment: its variables.
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


def end_with_parent(requests: int, folder: Path | None = None) -> threading.Thread:
    """In the child: kill its process group as soon as the other end of the pipe of requests is closed.

    A thread waits for it, so that a child in the middle of its work ends too, however its parent ended.

    Args:
        requests: the pipe of requests.
        folder: to be removed once the process group has ended.

    Returns:
        The thread; it does not end before the parent does.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(requests, 0)  # hang-ups are always reported
        poll.poll()
        if folder is None:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        else:
            _kill_and_remove(os.getpgrp(), folder)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def _kill_and_remove(group: int, folder: Path) -> None:
    """Kill this process's group and remove a folder, by a fork outside the group: nothing is left to write there."""
    try:
        if os.fork():
            return
        os.setsid()
    except OSError:  # no process to be had: less surely then, by this one
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for _ in range(_REMOVING_TRIES):  # the killed take a moment to end
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(_REMOVING_PAUSE_SECONDS)
    os._exit(0)


def requests_from(requests: int) -> Iterator[dict[str, Any]]:
    """In the child: each request in turn, until the parent hangs up."""
    with os.fdopen(requests, "rb", closefd=False) as stream:
        for line in stream:
            yield json.loads(line)


def answer(answers: int, message: Mapping[str, Any]) -> None:
    """In the child: send one answer."""
    data = json.dumps(message, default=repr).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]


def describe(error: BaseException) -> dict[str, Any]:
    """In the child: an exception as JSON values, our own whole, anybody else's by its traceback without our frames."""
    if is_ours(error):
        return describe_ours(error)
    ours = str(Path(__file__).resolve().parent.parent) + os.sep
    kept = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    text = ["Traceback (most recent call last):\n", *traceback.format_list(kept)]
    return {"type": "", "traceback": without_cpp("".join([*text, *traceback.format_exception_only(error)]))}


def is_ours(error: BaseException) -> bool:
    """Whether an exception's very class is in `batchfinder.errors`; what a user derives from one is the user's."""
    kind = type(error)
    return kind.__module__ == errors.__name__ and getattr(errors, kind.__name__, None) is kind


def describe_ours(error: BaseException) -> dict[str, Any]:
    """An error of ours as JSON values: its type, text and fields."""
    fields = {name: without_cpp(value) if isinstance(value, str) else value for name, value in vars(error).items()}
    return {"type": type(error).__name__, "message": without_cpp(str(error)), "fields": fields}


def without_cpp(text: str) -> str:
    """The text of an exception up to where it begins to tell of C++ frames."""
    return _CPP_FRAMES.sub("", text)


def revive(description: Mapping[str, Any], what: str) -> errors.BatchFinderError:
    """The error that a child described.

    Args:
        description: as `describe` makes it.
        what: what was being done, for the message.
    """
    if not description["type"]:
        return errors.UserCodeFailed(what, description["traceback"])
    kind = getattr(errors, description["type"])
    error: errors.BatchFinderError = kind.__new__(kind)
    Exception.__init__(error, description["message"])
    error.__dict__.update(description["fields"])
    return error
