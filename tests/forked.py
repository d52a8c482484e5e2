"""Several ranks on this machine: processes forked from one that has imported everything, so that they start at once."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def at_once(size: int, doing: Callable[[int], Any], seconds: float = 240.0) -> list[Any]:
    """Fork `size` processes of one gloo group, and return what `doing(rank)` returned in each, as JSON values.

    A process that ended without an answer, or had not ended in time and was killed, gives a text that says so.

    Args:
        size: how many.
        doing: what each does; no test's own thread may have run a backward here before.
        seconds: how long they may take.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(size, rank, doing, Path(folder), seconds) for rank in range(size)]
        ends = _wait(pids, time.monotonic() + seconds)
        return [_answer(Path(folder) / str(rank), end) for rank, end in enumerate(ends)]


def _fork(size: int, rank: int, doing: Callable[[int], Any], folder: Path, seconds: float) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    faulthandler.dump_traceback_later(0.9 * seconds, file=(folder / f"{rank}.trace").open("w"))
    try:
        import torch.distributed as dist

        os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        text = json.dumps(doing(rank))
    except BaseException:
        text = json.dumps(traceback.format_exc())
    (folder / f"{rank}.part").write_text(text)
    (folder / f"{rank}.part").rename(folder / str(rank))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait(pids: list[int], until: float) -> list[str]:
    ends = [""] * len(pids)
    while not all(ends):
        for index, pid in enumerate(pids):
            if not ends[index] and os.waitpid(pid, os.WNOHANG)[0]:
                ends[index] = "ended"
        if not all(ends) and time.monotonic() > until:
            for index, pid in enumerate(pids):
                if not ends[index]:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    ends[index] = "hung"
        time.sleep(0.005)
    return ends


def _answer(path: Path, end: str) -> Any:
    if path.exists():
        return json.loads(path.read_text())
    trace = path.with_suffix(".trace")
    return f"{end}\n{trace.read_text()}" if trace.exists() else end
