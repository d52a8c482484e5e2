"""Recordings in forks of a process that trains: a fork has the module already, and leaves its parent alone.

It cannot wait for the parent's threads, which it does not have (the autograd engine's, OpenMP's), nor call CUDA; it
must not write what the parent's files have buffered, nor run its signal handlers, finalizers and exit hooks. One that
waits for a lock is ended at the deadline.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from batchfinder.recording import fake_device
from batchfinder.simulator.trace import Trace
from batchfinder.training.child_process import ended, line_of_user, pipe


class NotRecordable(Exception):
    """The step cannot be recorded; the message says why. For code that does without the recording."""


def record_in_forks(record: Callable[[int], Trace], batch_sizes: Sequence[int], deadline: float) -> dict[int, Trace]:
    """Record at several batch sizes at once, each in a fork of this process.

    Args:
        record: records at a batch size.
        batch_sizes: micro-batches to record.
        deadline: when to give up, by `time.monotonic`.

    Raises:
        NotRecordable: a recording failed, its process died, or it did not end in time.
        OSError: the system does not allow another process.
    """
    children: dict[int, tuple[int, int]] = {}  # by batch size: the process and the pipe that it answers on
    written = dict.fromkeys(batch_sizes, b"")
    # A handler of the parent's that raises would carry a child into the parent's code, or lose it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        for batch_size in batch_sizes:
            children[batch_size] = _fork(record, batch_size, deadline)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with selectors.DefaultSelector() as selector:
            for batch_size, (_, reading) in children.items():
                selector.register(reading, selectors.EVENT_READ, batch_size)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise NotRecordable("recording it took longer than the time limit")
                for key, _ in ready:
                    if chunk := os.read(key.fd, 1 << 20):
                        written[key.data] += chunk
                    else:
                        selector.unregister(key.fd)
        traces = {}
        for batch_size, (process, _) in children.items():
            if not written[batch_size]:
                code = ended(process, wait=True)
                raise NotRecordable(f"the process that recorded it ended with {code}")
            answer = json.loads(written[batch_size])
            if "error" in answer:
                raise NotRecordable(answer["error"])
            traces[batch_size] = Trace.from_json(answer["trace"])
        return traces
    finally:
        for process, reading in children.values():
            os.close(reading)
            with suppress(ChildProcessError):  # it has been waited for
                if os.waitpid(process, os.WNOHANG) == (0, 0):
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(record: Callable[[int], Trace], batch_size: int, deadline: float) -> tuple[int, int]:
    """Start a process that records; returns its id and the pipe that it answers on. All signals are blocked."""
    reading, answers = pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads may hold locks: hence the deadline
        try:
            process = os.fork()
        except OSError:
            os.close(reading)
            os.close(answers)
            raise
    if process:
        os.close(answers)
        return process, reading
    try:
        _leave_parent_alone(answers, deadline)
        own = os.getpid()
        try:
            answer: dict[str, Any] = {"trace": record(batch_size).to_json()}
        except BaseException as error:
            line = line_of_user(traceback.extract_tb(error.__traceback__))
            answer = {"error": f"{type(error).__name__}: {error} {line}".rstrip()}
        if os.getpid() != own:  # the step has forked and lets both sides go on
            os._exit(0)
        with os.fdopen(answers, "wb") as stream:
            stream.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _leave_parent_alone(answers: int, deadline: float) -> None:
    """In the fork: share no file, handler, garbage or GPU with the parent, and end a second after the deadline."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        if int(name) not in (answers, null):
            os.dup2(null, int(name))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, deadline + 1 - time.monotonic()))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.freeze()
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):  # meant for the parent
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (hard, hard))
    torch.set_num_threads(1)
    fake_device.disable_cuda()
