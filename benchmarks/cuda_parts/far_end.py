"""The child process that uses the card: started when needed, replaced when it has died, ended when it hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from batchfinder.training.child_process import Child, ChildDied

WORKER = "benchmarks.cuda_parts.worker"


class Failed(Exception):
    """What was asked could not be answered; the text says why."""


class FarEnd:
    """Asks a child process, within a time.

    Args:
        device: as `torch.device` takes it; `cpu` for the stand-in.
        environment: variables to set for the child.
        module: what it runs.
    """

    def __init__(self, device: str, environment: Mapping[str, str] | None = None, module: str = WORKER) -> None:
        self._arguments = [device]
        self._environment = dict(environment or {})
        self._module = module
        self._child: Child | None = None

    def __enter__(self) -> FarEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the child now, so that its imports run while something else is done."""
        if self._child is None:
            self._child = Child(self._module, self._arguments, self._environment)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            request: JSON values.
            seconds: how long to wait.

        Raises:
            Failed: it answered with an error, died or took too long. The next request gets a new child if need be.
        """
        self.start()
        assert self._child is not None
        too_long = threading.Event()
        timer = threading.Timer(max(1.0, seconds), self._end, (self._child.pid, too_long))
        timer.start()
        try:
            answer = self._child.ask(request)
        except ChildDied as death:
            self.close()
            if too_long.is_set():
                raise Failed(f"no answer within {seconds:.0f} s, ended for that") from death
            raise Failed(f"the process ended with {death.exit_code}: {death.last_words[-400:]}") from death
        finally:
            timer.cancel()
        if "error" in answer:
            if answer.get("dead"):
                self.close()
            raise Failed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
            self._child = None

    @staticmethod
    def _end(pid: int, too_long: threading.Event) -> None:
        too_long.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
