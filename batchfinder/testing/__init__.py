"""Tests of CUDA memory paths without a GPU: functions and scripts in processes with cards of any kind.

They run on PyTorch's own CUDA build: its caching allocator, its errors, its operators' memory. `batchfinder stub
install` brings it once. In a conftest.py:

    pytest_plugins = ["batchfinder.testing"]

and in a test:

    def test_one_step_fits(cuda_stub):
        seen = cuda_stub(gpu="T4").run(train, batch_size=64)
        assert seen.peak_reserved_bytes < 14 << 30
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import pytest

from batchfinder.cuda_stub import CudaBuild, StubReport, StubSession, find_build
from batchfinder.errors import CudaStubUnavailable
from batchfinder.stub_cards import open_session, stub_card
from batchfinder.units import parse_bytes

_CHILD = Path(__file__).parent / "child.py"
_ROOT = str(Path(__file__).resolve().parents[2])
_LAST_WORDS = 4000
_SECONDS_TO_END = 60.0
"""What a process may take to end that was killed."""


class _Forks:
    """A process on the stub in whose forks functions are called: imports are shared, nothing else.

    Args:
        session: of cards of its own, which only say which build and which values.
    """

    def __init__(self, session: StubSession) -> None:
        self._session = session
        self._imported: dict[str, None] = {}  # by functions before, which the next are likely to import
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb", buffering=0)  # `select` sees nothing of what a buffer has
        self._process = subprocess.Popen(
            [sys.executable, str(_CHILD), _ROOT, "serve"],
            env={**os.environ, **session.variables(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=writing,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        os.close(writing)
        self.lock = threading.Lock()

    def ask(self, place: Path, environment: dict[str, str], keep_events: bool) -> int | None:
        """Have a fork do the work that lies in a folder, and return its id; None where this process has ended."""
        assert self._process.stdin is not None
        request = {
            "folder": str(place),
            "environment": environment,
            "directory": os.getcwd(),
            "keep_events": keep_events,
            "imported": list(self._imported),
        }
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            return None
        line = self._answers.readline()
        return int(line) if line else None

    def wait(self, timeout: float) -> int | None:
        """The exit code of the fork; None where it has not ended in time."""
        if not select.select([self._answers], [], [], timeout)[0]:
            return None
        return int(self._answers.readline() or b"1")

    def remember(self, imported: Iterable[str]) -> None:
        """Import these before the next fork."""
        self._imported.update(dict.fromkeys(imported))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._session.close()


_forks: dict[tuple[int, str, str], _Forks] = {}
"""By the process that started it, the build and which values are computed."""
_forks_lock = threading.Lock()


def _end_forks(key: tuple[int, str, str]) -> None:
    with _forks_lock:
        if (forks := _forks.pop(key, None)) is not None:
            forks.close()


def _end_all() -> None:
    for key in list(_forks):
        if key[0] == os.getpid():
            _end_forks(key)


atexit.register(_end_all)


class StubProcessFailed(Exception):
    """A process on the stub ended without a result.

    Attributes:
        exit_code: its exit code, negative for a signal.
        output: what it printed.
    """

    def __init__(self, what: str, exit_code: int, output: str) -> None:
        self.exit_code = exit_code
        self.output = output
        super().__init__(f"{what} ended with {exit_code}:\n{output[-_LAST_WORDS:]}")


@dataclass(frozen=True)
class StubRun:
    """What a process on the stub came to.

    Attributes:
        result: what the function returned; None for a script.
        exit_code: of the process; 0 for one that ended well.
        output: all that it printed, to stdout and stderr.
        memory_stats: `torch.cuda.memory_stats` of each card that it used, in the cards' order.
        events: what the allocator did on each card, where it was asked to be kept: dictionaries with `action`, `addr`,
            `size` and `stream`, as in `device_traces` of a memory snapshot.
        report: what was assumed, what CUDA functions are missing, which values were read that are not known.
    """

    result: Any
    exit_code: int
    output: str
    memory_stats: tuple[dict[str, int], ...]
    events: tuple[list[dict[str, Any]], ...] = ()
    report: StubReport = field(default_factory=StubReport)

    def _most(self, name: str) -> int:
        return max((stats.get(name, 0) for stats in self.memory_stats), default=0)

    @property
    def peak_allocated_bytes(self) -> int:
        """`torch.cuda.max_memory_allocated` of the card where it is largest."""
        return self._most("allocated_bytes.all.peak")

    @property
    def peak_reserved_bytes(self) -> int:
        """`torch.cuda.max_memory_reserved` of the card where it is largest."""
        return self._most("reserved_bytes.all.peak")

    @property
    def num_ooms(self) -> int:
        """Out-of-memory errors that the allocator raised, caught ones too."""
        return sum(stats.get("num_ooms", 0) for stats in self.memory_stats)

    @property
    def num_alloc_retries(self) -> int:
        """How often the allocator emptied its cache to go on."""
        return sum(stats.get("num_alloc_retries", 0) for stats in self.memory_stats)


@dataclass(frozen=True)
class CudaStub:
    """Simulated cards for processes; see `CudaStubFixture` for the arguments."""

    gpu: str | None = None
    memory: str | int | None = None
    count: int = 1
    held: str | int | Sequence[str | int] = 0
    values: bool = True
    events: str = "early"
    addresses: str = "cuda"
    keep_events: bool = False
    allocator: str = ""
    build: CudaBuild | None = None
    timeout: float = 300.0

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> StubRun:
        """Call a function in a process with these cards, a fork of one that has imported torch.

        Function, arguments and result travel by cloudpickle. Modules of the test's are pickled by value.

        Raises:
            StubProcessFailed: the process died, or was ended after `timeout` seconds.
            Exception: what the function raised, with the traceback of the process as a note.
        """
        module = sys.modules.get(getattr(function, "__module__", ""))
        by_value = module is not None and module.__name__ != "__main__" and not _is_installed(module)
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        try:
            work = cloudpickle.dumps((function, args, kwargs))
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)
        return self._start(getattr(function, "__name__", "the function"), [], work)

    def run_script(self, path: str | os.PathLike[str], *arguments: str) -> StubRun:
        """Run a Python script, as `python path arguments` does; an exit code other than 0 is no error here.

        Raises:
            StubProcessFailed: it was ended after `timeout` seconds, or died before it began.
        """
        return self._start(str(path), [os.fspath(path), *arguments], None)

    def _start(self, what: str, script: list[str], work: bytes | None) -> StubRun:
        held = [self.held] * self.count if isinstance(self.held, (str, int)) else list(self.held)
        memory = None if self.memory is None else parse_bytes(self.memory, "memory")
        cards = [stub_card(self.gpu, memory, 0 if each in (0, "0") else parse_bytes(each, "held")) for each in held]
        session = open_session(
            cards,
            build=self.build,
            values="small" if self.values else "none",
            events=self.events,
            addresses=self.addresses,
        )
        with session:
            place = session.folder / "run"
            place.mkdir()
            if work is not None:
                (place / "work").write_bytes(work)
            environment = {**os.environ, **session.variables(), "PYTHONUNBUFFERED": "1"}
            if self.allocator:
                environment["PYTORCH_CUDA_ALLOC_CONF"] = self.allocator
            # The allocator's backend is chosen as torch is imported.
            if work is not None and "backend" not in environment.get("PYTORCH_CUDA_ALLOC_CONF", ""):
                code = self._forked(what, place, environment)
            else:
                code = self._spawned(what, place, environment, script)
            printed = (place / "output").read_text(errors="replace")
            if not (place / "result").exists():
                raise StubProcessFailed(what, code, printed)
            seen = pickle.loads((place / "result").read_bytes())
            if "raised" in seen:
                raise _revived(seen, what, code, printed)
            return StubRun(
                seen.get("result"), code, printed, tuple(seen["stats"]), tuple(seen["events"]), session.report()
            )

    def _forked(self, what: str, place: Path, environment: dict[str, str]) -> int:
        """Have a fork do the work; its exit code."""
        (place / "output").touch()
        with _forks_lock:
            build = self.build or find_build()
            key = os.getpid(), str(build), str(self.values)
            if key not in _forks:
                values = "small" if self.values else "none"
                _forks[key] = _Forks(open_session([stub_card()], build=self.build, values=values))
            forks = _forks[key]
        with forks.lock:
            child = forks.ask(place, environment, self.keep_events)
            if child is None:  # what it had imported has used CUDA: a process for itself
                _end_forks(key)
                return self._spawned(what, place, environment, [])
            code = None
            try:
                code = forks.wait(self.timeout)
            finally:
                if code is None:  # it has taken too long, or this test is interrupted
                    _kill(child)
                    if forks.wait(_SECONDS_TO_END) is None:
                        _end_forks(key)
            if code is None:
                printed = (place / "output").read_text(errors="replace")
                raise StubProcessFailed(f"{what}, after {self.timeout:g} s,", -signal.SIGKILL, printed)
            with contextlib.suppress(OSError):
                forks.remember(pickle.loads((place / "result").read_bytes())["imported"])
        return code

    def _spawned(self, what: str, place: Path, environment: dict[str, str], script: list[str]) -> int:
        """Do the work, or run the script, in a process of its own; its exit code."""
        command = [sys.executable, str(_CHILD), _ROOT, str(place), str(int(self.keep_events)), *script]
        with (place / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                return process.wait(self.timeout)
            except BaseException as error:
                _kill(process.pid)
                code = process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
        printed = (place / "output").read_text(errors="replace")
        raise StubProcessFailed(f"{what}, after {self.timeout:g} s,", code, printed)


def _kill(leader: int) -> None:
    """Kill a process that leads a group of its own, or is about to."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def _revived(seen: dict[str, Any], what: str, code: int, printed: str) -> Exception:
    try:
        error = pickle.loads(seen["raised"])
    except Exception:
        return StubProcessFailed(f"{what} raised {seen['words']}", code, seen["traceback"] or printed)
    assert isinstance(error, Exception)
    error.add_note(f"in a process on the CUDA stub:\n{seen['traceback']}")
    return error


def _is_installed(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or "site-packages" in file or file.startswith(str(Path(os.__file__).parent))


class CudaStubFixture(Protocol):
    """What the fixture `cuda_stub` is: called with what the cards are to be, it gives what runs processes on them."""

    def __call__(
        self,
        *,
        gpu: str | None = None,
        memory: str | int | None = None,
        count: int = 1,
        held: str | int | Sequence[str | int] = 0,
        values: bool = True,
        events: str = "early",
        addresses: str = "cuda",
        keep_events: bool = False,
        allocator: str = "",
        build: CudaBuild | None = None,
        timeout: float = 300.0,
    ) -> CudaStub:
        """Describe the cards.

        Args:
            gpu: a GPU of batchfinder's catalogue, for its kind and its memory; None for an A100's kernels.
            memory: of each card, such as `16GiB`; None for what the named one has (80 GiB without a name). With it no
                context is counted, so that PyTorch's allocator gets all of it.
            count: how many cards.
            held: what something else holds of each, or a list with one for each card.
            values: whether values of small tensors are computed.
            events: `early`, `late` or `in-order`: when work on other streams is done.
            addresses: where segments lie: `cuda`, `low`, `rising` or `falling`.
            keep_events: whether `StubRun.events` has what the allocator did.
            allocator: as PYTORCH_CUDA_ALLOC_CONF has it, such as `expandable_segments:True`.
            build: another CUDA build of PyTorch than this environment's version, from `batchfinder.cuda_stub`.
            timeout: in seconds, after which a process is ended.
        """


@pytest.fixture(scope="session")
def cuda_stub() -> CudaStubFixture:
    """Processes with simulated cards, of PyTorch's own CUDA build; without one, the test is skipped and says why."""
    try:
        with open_session([stub_card()]):
            pass
    except CudaStubUnavailable as error:
        pytest.skip(str(error))
    return CudaStub
