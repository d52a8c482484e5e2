"""Steps in a thread of their own, and what of them stays."""

from __future__ import annotations

import _thread
import contextvars
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.measure.apart import apart, at_home

STATE: contextvars.ContextVar[str] = contextvars.ContextVar("state")

CONVOLUTIONS = """
import json, resource, torch
from pathlib import Path
from typing import Any
from batchfinder.measure.apart import apart
from batchfinder.measure.cleanup import attempt
from batchfinder.measure.oom import classify

torch.set_num_threads(1)
net = torch.nn.Conv2d(3, 16, 3, padding=1)

def step(size):
    net(torch.randn(size, 3, 32, 32)).sum().backward()

def limited(size, left):
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + left, resource.RLIM_INFINITY))
    try:
        step(size)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

run = {True: apart, False: lambda steps: steps()}[APART]
run(lambda: step(1))
failures = []
for size in range(2, 40):  # a new shape each, with 128 KiB more each
    failed = run(lambda: attempt(lambda: limited(size, size << 17), "cpu"))
    failures += [failed.message] if failed else []
    if failed and "create a primitive" in failed.message:
        break
after = attempt(lambda: step(50), "cpu")
print(json.dumps([failures, after and after.message]))
"""


def convolutions(apart: bool) -> list[object]:
    """Convolve new shapes under a growing limit until oneDNN fails, then one without a limit."""
    done = subprocess.run(
        [sys.executable, "-c", CONVOLUTIONS.replace("APART", str(apart))],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
@pytest.mark.skipif(sys.platform != "linux", reason="no RLIMIT_AS")
def test_what_onednn_remembers_of_a_failure_ends_with_the_thread() -> None:
    """A kernel that could not be compiled in a thread of its own does not stop a new shape in this one."""
    failures, after = convolutions(apart=True)
    assert isinstance(failures, list)
    if not any("could not create a primitive" in failure for failure in failures):
        pytest.skip("oneDNN compiles no kernels on this processor")
    assert after is None


def test_returns_and_raises_what_the_steps_do() -> None:
    """The very object; in another thread, which has ended."""
    made, error = object(), ValueError("mine")
    threads: list[threading.Thread] = []

    def steps() -> object:
        threads.append(threading.current_thread())
        return made

    def failing() -> None:
        raise error

    assert apart(steps) is made
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
    with pytest.raises(ValueError, match="mine") as caught:
        apart(failing)
    assert caught.value is error


def test_nothing_keeps_the_steps_alive() -> None:
    """Neither what they held nor what they raised, without a garbage collection."""

    class Held:
        pass

    def failing() -> None:
        held = Held()
        dead.append(weakref.ref(held))
        raise KeyError

    dead: list[weakref.ref[Held]] = []
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyError):
            apart(failing)
        assert dead[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("context", "seen"),
    [
        (torch.enable_grad, [True, False, False]),
        (torch.no_grad, [False, False, False]),
        (torch.inference_mode, [False, True, False]),
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), [True, False, True]),
    ],
)
def test_computes_as_this_thread_does(context: Callable[[], torch.no_grad], seen: list[bool]) -> None:
    """Gradients, inference, casts and context variables are this thread's."""

    def steps() -> list[object]:
        casts = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        return [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts, STATE.get()]

    STATE.set("here")
    with context():
        assert apart(steps) == [*seen, "here"]


def test_steps_that_a_mode_watches_run_here() -> None:
    """A mode sees the operators of its own thread alone."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        apart(lambda: torch.ones(1))
    assert counting.count == 1
    with torch.device("meta"):
        assert apart(lambda: torch.ones(1).device.type) == "meta"


def test_without_memory_for_a_thread_the_steps_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they would have without us."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert apart(threading.get_ident) == threading.get_ident()


def test_a_function_can_be_called_at_home() -> None:
    """In the thread that called, as often as the steps like; what it raises reaches them."""
    here = threading.get_ident()

    def failing() -> None:
        raise LookupError("mine")

    def steps() -> list[bool]:
        with pytest.raises(LookupError, match="mine"):
            at_home(failing)
        return [threading.get_ident() == here, *(at_home(threading.get_ident) == here for _ in range(3))]

    assert apart(steps) == [False, True, True, True]
    assert at_home(threading.get_ident) == here


@pytest.mark.parametrize("wait", [0.0, 0.05], ids=["at once", "in a wait"])
@pytest.mark.parametrize("how", [_thread.interrupt_main, lambda: os.kill(os.getpid(), signal.SIGINT)])
@pytest.mark.parametrize("at", ["steps", "home"])
def test_an_interrupt_ends_the_steps(at: str, how: Callable[[], None], wait: float) -> None:
    """They see it as they would in the main thread, and it is raised here after them, whenever it comes."""
    ended = []

    def busy() -> None:
        time.sleep(wait)
        how()
        while True:
            time.sleep(0.001)

    def steps() -> None:
        try:
            busy() if at == "steps" else at_home(busy)
        except KeyboardInterrupt:
            ended.append(threading.current_thread())
            raise

    with pytest.raises(KeyboardInterrupt):
        apart(steps)
    assert len(ended) == 1
    assert ended[0] is not threading.main_thread()
