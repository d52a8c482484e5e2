"""Recording processes that are forks of one process, which has imported torch and transformers once for them all.

A fork runs the module that a new process would run, with the same pipes, folder, log, variables and session. What it is
spared is 3 s of imports, which are most of what a recording of a small model takes.

This file is the far end as well, as a script: `python prefork.py SOCKET IMPORTED...`. Over the socket come a child's
command and its descriptors, and its number goes back; its exit status comes over a pipe of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import pytest

from batchfinder.training import child_process

IMPORTED = (
    *("batchfinder.recording.fake_device", "batchfinder.recording.record_step", "batchfinder.models.pretrained"),
    *("batchfinder.models.build", "batchfinder.models.fingerprint", "torch.fx.experimental.symbolic_shapes"),
    "torch._dynamo",
    *[f"transformers.models.{model}.modeling_{model}" for model in ("bert", "gpt2", "llama")],
)
RECORDING = "batchfinder.recording.server"
_MESSAGE_BYTES = 1 << 18
_start = child_process.start


class Fork:
    """The near end's view of one child: as much of `subprocess.Popen` as its owner uses."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None and not select.select([self._status], [], [], 0)[0]:
            return None
        return self.wait()

    def wait(self) -> int:
        """Its exit code, negative for a signal, once it has ended; any thread may wait."""
        with self._waiting:
            if self.returncode is None:
                with os.fdopen(self._status) as stream:
                    self.returncode = int(stream.read() or -signal.SIGKILL)
        return self.returncode


class Prefork:
    """The process that is forked. It ends when this end's socket is closed.

    Args:
        module: what forks run; other modules' processes are started as ever.
        imported: what is imported once for all forks.
        environment: variables that a process reads only as it starts, such as those of malloc.
    """

    def __init__(
        self,
        module: str = RECORDING,
        imported: Sequence[str] = IMPORTED,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._socket, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(far_end.fileno()), *imported],
            pass_fds=(far_end.fileno(),),
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
        )
        far_end.close()

    def start(
        self,
        module: str,
        descriptors: tuple[int, int],
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
    ) -> Fork | subprocess.Popen[bytes]:
        """What `batchfinder.training.child_process.start` does, which starts other modules' processes."""
        if module != self._module:
            return _start(module, descriptors, arguments, log, environment)
        command = {"module": module, "arguments": list(arguments), "cwd": os.getcwd(), "environment": {**environment}}
        ended, status = os.pipe()
        with log.open("wb") as file:
            socket.send_fds(self._socket, [json.dumps(command).encode()], [*descriptors, file.fileno(), status])
        os.close(status)
        return Fork(int(self._socket.recv(_MESSAGE_BYTES)), ended)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Let recorders start their processes so."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(child_process, "start", self.start)
            yield

    def __enter__(self) -> Prefork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait()


def serve(near_end: socket.socket, imported: Sequence[str]) -> None:
    """Fork as asked until the near end hangs up."""
    for module in imported:
        importlib.import_module(module)
    gc.freeze()
    running: dict[int, tuple[int, int]] = {}
    selector = selectors.DefaultSelector()
    selector.register(near_end, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd != near_end.fileno():
                selector.unregister(key.fd)
                os.close(key.fd)
                process, status = running.pop(key.fd)
                os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
                os.close(status)
                continue
            message, descriptors, _, _ = socket.recv_fds(near_end, _MESSAGE_BYTES, 4)
            if not message:
                return
            *given, status = descriptors
            process = os.fork()
            if process == 0:
                selector.close()
                near_end.close()
                for descriptor in (*running, *(each for _, each in running.values()), status):
                    os.close(descriptor)
                run(json.loads(message), *given)
            for descriptor in given:
                os.close(descriptor)
            watched = os.pidfd_open(process)
            running[watched] = (process, status)
            selector.register(watched, selectors.EVENT_READ)
            near_end.send(str(process).encode())


def run(command: dict[str, Any], requests: int, answers: int, log: int) -> NoReturn:
    """In the fork: become what a new process would have been, and end."""
    code: Any = 1
    try:
        os.setsid()
        for descriptor, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(descriptor, standard)
        os.close(log)
        os.chdir(command["cwd"])
        os.environ.clear()
        os.environ.update(command["environment"])
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:1] = [entry for entry in path if entry and entry not in sys.path]
        sys.argv = [command["module"], str(requests), str(answers), *command["arguments"]]
        importlib.invalidate_caches()
        sys.modules.pop("__mp_main__", None)  # this file, which would pass for code of the user's
        runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
