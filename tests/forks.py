"""A process that has imported everything, and forks for each request: one start for all processes that tests need.

    python -m tests.forks <requests> <answers> <module>

A fork begins with the memory that its parent has, so two of them have the same room under one limit. The module has
`prepare()`, which loads what requests need and runs no backward, whose threads a fork would not have; and
`respond(request)`, which returns JSON values.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from batchfinder.measure.worker import in_fork
from batchfinder.training.child_process import Child, answer, end_with_parent, requests_from

ROOT = Path(__file__).parents[1]

SECONDS = 300
"""How long one request may take that does not say (`seconds`): many times what it does on a busy machine."""

_MAP_FIXED_NOREPLACE = 0x100000  # of mmap(2)

SHARP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "4096",
    "PYTHONMALLOC": "malloc",  # Python's own allocator maps 1 MiB at a time
    "PYTHONHASHSEED": "0",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # fewer page faults: twice as fast
}
"""With these freed memory goes back at once, so that a limit means the same at each size."""


class Forks:
    """The near end: asks for forks.

    Args:
        child: runs this module.
    """

    def __init__(self, child: Child) -> None:
        self._child = child

    def run(self, **request: Any) -> Any:
        """What the module's `respond` returned in a fork of its own."""
        answered = self._child.ask(request)
        assert "response" in answered, f"{answered}\n{self._child.last_words()}"
        return answered["response"]


@contextmanager
def forks(module: str, *paths: Path, malloc: Mapping[str, str] = SHARP) -> Iterator[Forks]:
    """Start a process that forks for requests to a module.

    Args:
        module: what responds to them.
        paths: where more modules are, beside the checkout.
        malloc: variables that set up malloc.
    """
    environment = {
        **malloc,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # with a card in sight the engine starts threads that a fork would lose
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths))),
    }
    with Child("tests.forks", [module], environment) as child:
        yield Forks(child)


def limit_growth(mib: int) -> int:
    """In a fork: let this process grow by no more, by its soft RLIMIT_AS; returns the limit in bytes.

    The stack grows before that, and stays as large: one that cannot grow any more is a SIGSEGV. The heap cannot grow at
    all: right at the limit, where there is no room to map a large tensor by itself, malloc would put it there, and what
    is put above it leaves a hole of that size (40 MiB have been seen) until the process ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = libc.mmap.restype = ctypes.c_void_p
    page = resource.getpagesize()
    above = -(-libc.sbrk(0) // page) * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    libc.mmap(ctypes.c_void_p(above), ctypes.c_size_t(page), 0, flags, -1, ctypes.c_long(0))

    def deeper(calls: int) -> int:
        # Through C: a call from Python to Python takes nothing of this stack.
        return calls and max([calls - 1], key=deeper)

    deepest = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    deeper(4_000)
    sys.setrecursionlimit(deepest)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = size + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    return limit


def lift_limit() -> None:
    """In a fork: what comes after the training may take what it likes."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def ready_to_search(model: Any) -> None:
    """In `prepare`: what else a search takes once. An optimizer's imports take seconds.

    Args:
        model: any module, which an optimizer steps.
    """
    import torch

    import batchfinder.measure.oom  # noqa: F401

    torch.set_num_threads(1)
    threading.stack_size(1 << 20)  # a search leaves the stack of one thread behind
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(model.parameters()).step()


def verdict_of(error: Exception) -> str:
    """The name of what an error of the CPU's means; its own words where it means nothing."""
    from batchfinder.measure.oom import classify

    classified = classify(error, device="cpu")
    return str(error) if classified is None else classified.name


def _respond(module: Any, request: dict[str, Any]) -> dict[str, Any]:
    signal.alarm(request.get("seconds", SECONDS))
    return {"response": module.respond(request)}


def main(argv: list[str]) -> None:
    """Fork for each request until the parent hangs up."""
    requests, answers = int(argv[0]), int(argv[1])
    end_with_parent(requests)
    module = importlib.import_module(argv[2])
    module.prepare()
    for request in requests_from(requests):
        answer(answers, in_fork(partial(_respond, module, request)))


if __name__ == "__main__":
    main(sys.argv[1:])
