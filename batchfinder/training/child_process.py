"""A child process that does work for this one: JSON lines over two pipes, and a log for all that it prints.

Both ends are here. The parent starts a module with `<requests> <answers> <arguments>` as its command line, sends
requests and reads answers; the child answers. The child, and whatever it started, ends with its parent. Nothing here
imports torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
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
SILENT_SECONDS = 300.0
"""A child that owes an answer, and neither gives it nor uses the processor for so long, waits for what never comes."""

SILENCE = "it neither answered nor used the processor for {:g} s, and was ended"
"""What is said of a process that was ended for its silence, with the seconds of it."""

_LOOK_SECONDS = 0.5  # how often a process that is waited for is looked at
_LOCK = ".lock"
_locks: dict[Path, int] = {}  # by folder: the descriptor that keeps its lock
# Unlike `-m`, this puts the working folder nowhere on the path; what this process found batchfinder by comes last.
_RUN = (
    "import runpy, sys; root, module = sys.argv[1:3]; del sys.argv[1:3]; sys.path.append(root); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
_REMOVE_TRIES = 50
_REMOVE_PAUSE_SECONDS = 0.02
_ROOT = str(Path(__file__).resolve().parents[2])
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
        folder: where its log is written, as `temporary_folder` made it, removed by `close`; a new one by default.

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
        self.folder = folder or temporary_folder()
        self._asked_at = 0
        self._sending = threading.Lock()
        self._received = b""
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as ends_of_child:
            failed.callback(_remove, self.folder)
            requests, self._requests = pipe()
            ends_of_child.callback(os.close, requests)
            failed.callback(os.close, self._requests)
            self._answers, answers_write = pipe()
            ends_of_child.callback(os.close, answers_write)
            failed.callback(os.close, self._answers)
            self._process = start(
                module, (requests, answers_write), arguments, self.folder / "log", {**os.environ, **(environment or {})}
            )
            failed.pop_all()
        self.pid = self._process.pid

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            ChildDied: it ended instead, with what it printed since this request; or it was ended, being silent for
                `SILENT_SECONDS` or with an answer that cannot be read.
        """
        self._asked_at = 0
        with contextlib.suppress(OSError):
            self._asked_at = (self.folder / "log").stat().st_size
        self.send(request)
        return self.receive(SILENT_SECONDS)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request. To a child that has ended nothing is sent: `receive` raises."""
        with self._sending, contextlib.suppress(BrokenPipeError):
            if self._requests >= 0:
                _write_line(self._requests, json.dumps(request))

    def receive(self, silent_seconds: float | None = None) -> dict[str, Any]:
        """Wait for the next answer.

        Args:
            silent_seconds: for how long the child's processes may use no processor time; None for ever.

        Raises:
            ChildDied: it ended instead; or it was ended, being silent or with an answer that cannot be read.
        """
        answers = select.poll()  # unlike select, it takes descriptors above 1023
        answers.register(self._answers, select.POLLIN)
        busy: int | None = None
        busy_at = looked_at = time.monotonic()
        while b"\n" not in self._received:
            has_ended = self._process.poll() is not None
            if answers.poll(0 if has_ended else 1000 * _LOOK_SECONDS):
                chunk = os.read(self._answers, 1 << 20)
                self._received += chunk
                has_ended = not chunk
            elif has_ended:
                pass  # though the pipe is open: something that it started has it too
            elif silent_seconds is not None and time.monotonic() - looked_at > silent_seconds / 20:
                looked_at = time.monotonic()
                ticks = busy_ticks(self.pid, group=True)
                if ticks is None or ticks != busy:
                    busy, busy_at = ticks, looked_at
                elif looked_at - busy_at > silent_seconds:
                    self.kill()
                    words = f"{SILENCE.format(silent_seconds)}\n{self.last_words()}"
                    raise ChildDied(self._process.wait(), words.strip())
            if has_ended:
                raise ChildDied(self._process.wait(), self.last_words())
        line, _, self._received = self._received.partition(b"\n")
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
            os.close(self._answers)
        _remove(self.folder)


def _remove(folder: Path) -> None:
    """Remove a folder that `temporary_folder` has made."""
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)
    try:  # `rmtree` takes two descriptors, and there may be none left where nothing was started
        (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


def pipe() -> tuple[int, int]:
    """`os.pipe`, whose ends are never 0, 1 or 2: where those were closed, a child would take them for its streams."""
    import fcntl

    with contextlib.ExitStack() as failed, contextlib.ExitStack() as low_ends:
        low = os.pipe()
        for end in low:
            low_ends.callback(os.close, end)
        reading = fcntl.fcntl(low[0], fcntl.F_DUPFD_CLOEXEC, 3)
        failed.callback(os.close, reading)
        writing = fcntl.fcntl(low[1], fcntl.F_DUPFD_CLOEXEC, 3)
        failed.pop_all()
    return reading, writing


def temporary_folder() -> Path:
    """A new temporary folder, locked while this process lives; those that killed processes have left are removed.

    A lock goes with the process that has it, however it ends, and is seen from other containers.
    """
    import fcntl

    for lock in Path(tempfile.gettempdir()).glob(f"batchfinder-*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_uid == os.getuid():
                shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="batchfinder-"))
    # Under another name until it is locked, so that nobody takes the folder for one that was left.
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # no more files may be open, or the disk is full
        folder.rmdir()
        raise
    with contextlib.suppress(OSError):  # not every file system has locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        (folder / "lock").rename(folder / _LOCK)
    _locks[folder] = descriptor
    return folder


def busy_ticks(process: int, group: bool = False) -> int | None:
    """Processor time that a process and what it has waited for have used; None where the system does not tell.

    With `group`, of all processes in its process group.
    """
    total = 0
    found = False
    for stat in Path("/proc").glob("[0-9]*/stat") if group else [Path(f"/proc/{process}/stat")]:
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            if not group or int(fields[2]) == process:
                total += sum(map(int, fields[11:15]))
                found = True
    return total if found else None


def ended(process: int, wait: bool = False) -> int | None:
    """The exit code of a process that was forked, negative for a signal; None while it runs, unless it is waited for.

    0 where the system forgets how processes end, since SIGCHLD is ignored.
    """
    try:
        found, status = os.waitpid(process, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status) if found else None


def read_until_end(reading: int, process: int) -> tuple[bytes, int]:
    """All that a fork writes to a pipe until it ends, and its exit code; what it leaves running may hold the pipe."""
    data = b""
    code: int | None = None
    pipe_end = select.poll()
    pipe_end.register(reading, select.POLLIN)
    while True:
        if pipe_end.poll(1000 * _LOOK_SECONDS if code is None else 0):
            chunk = os.read(reading, 1 << 20)
            if not chunk:
                break
            data += chunk
        elif code is not None:
            break
        else:
            code = ended(process)
    if code is None:
        code = ended(process, wait=True) or 0
    return data, code


def search_working_folder() -> None:
    """Let modules of the user's be imported from the working folder, for good: code may import from it later."""
    with contextlib.suppress(FileNotFoundError):  # it has been removed
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())


def build_with(builder: str, arguments: Mapping[str, Any]) -> Any:
    """In the child: call a builder, `module:function`; one of the user's may lie in the working folder."""
    process = os.getpid()
    try:
        module, _, attribute = builder.partition(":")
        if not module.startswith("batchfinder."):
            search_working_folder()
        return getattr(importlib.import_module(module), attribute)(**arguments)
    finally:
        if os.getpid() != process:  # it has forked and lets both sides go on: one is enough
            os._exit(0)


def start(
    module: str, descriptors: tuple[int, int], arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a child, in a session of its own.

    Its ends of the pipes of requests and answers stand first on its command line; all that it prints goes to the log.
    """
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _RUN, _ROOT, module, *map(str, descriptors), *arguments],
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
    message = _CPP_FRAMES.sub("", errors.without_middle(str(error)))
    # A user's class may be derived from one of ours, or have its name.
    if kind.__module__ == errors.__name__ and getattr(errors, kind.__name__, None) is kind:
        fields = {
            n: _CPP_FRAMES.sub("", value) if isinstance(value, str) else value for n, value in vars(error).items()
        }
        return {"type": kind.__name__, "message": message, "fields": fields}
    inner, all_frames = _folders_of("torch"), traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if not frame.filename.startswith(inner)]
    text = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    return {
        "type": "",
        "message": f"{kind.__name__}: {message}",
        "module": kind.__module__,
        "line": line_of_user(all_frames),
        "traceback": _CPP_FRAMES.sub(
            "", errors.without_middle("".join([*text, *traceback.format_exception_only(error)]))
        ),
    }


def line_of_user(frames: Sequence[traceback.FrameSummary]) -> str:
    """Where in the user's own code something happened: `at model.py:12, in forward: y = x.item()`.

    It is the innermost frame outside batchfinder, torch, transformers and Python's own library; else the innermost one
    in transformers; empty where there is neither.

    Args:
        frames: outermost first.
    """
    standard = os.path.dirname(os.__file__) + os.sep
    for libraries in (_folders_of("torch", "transformers"), _folders_of("torch")):
        for frame in reversed(frames):
            installed = "-packages" + os.sep in frame.filename  # a folder of the standard library's, on some systems
            if (
                frame.line
                and not frame.filename.startswith(libraries)
                and (installed or not frame.filename.startswith((standard, "<")))
            ):
                return f"at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def line_of_crash(dump: str) -> str:
    """`line_of_user` of what `faulthandler` has written of a process that a signal ended; empty for no dump."""
    places = re.findall(r'File "(.+)", line (\d+) in (.+)', dump)
    return line_of_user([traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(places)])


def _folders_of(*packages: str) -> tuple[str, ...]:
    """Where batchfinder's modules lie, and those of these packages, which are not imported for it."""
    folders = [Path(__file__).resolve().parent.parent]
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            folders.append(Path(spec.origin).resolve().parent)
    return tuple(f"{folder}{os.sep}" for folder in folders)
