from __future__ import annotations

import itertools
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from batchfinder.cache import Store
from tests.cache.traffic import read, write

WRITERS, WRITES, KILLS, READERS = 16, 200, 24, 2


class Fork:
    """A process that calls a function; what it prints goes to files."""

    _numbers = itertools.count()

    def __init__(self, folder: Path, function: Callable[..., None], *arguments: object) -> None:
        number = next(self._numbers)
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for path, standard in ((self._out, 1), (self._err, 2)):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), standard)
                function(*arguments)
                os._exit(0)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(1)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            process, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """Wait for its end: what it printed and what it complained of."""
        self.poll(0)
        out, err = (path.read_text() if path.exists() else "" for path in (self._out, self._err))
        return out, err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_damaged_record_is_ever_returned(tmp_path):
    """16 processes x 200 writes to one cache, 24 of them killed on the way: readers meet whole records only."""
    url, stop, chance = str(tmp_path / "cache"), tmp_path / "stop", random.Random(7)
    said_in = tmp_path / "said"
    said_in.mkdir()
    readers = [Fork(said_in, read, url, str(stop)) for _ in range(READERS)]
    writers = {number: Fork(said_in, write, url, number, WRITES) for number in range(WRITERS)}
    killed = done = 0
    try:
        while writers:
            time.sleep(0.03)
            for number, writer in list(writers.items()):
                if writer.poll() is None:
                    continue
                written, complaint = writer.communicate()
                assert (writer.returncode, complaint) in {(0, ""), (-9, "")}
                done += len(written)
                del writers[number]
                if writer.returncode:  # a killed one's successor writes what is left
                    writers[number] = Fork(said_in, write, url, number, max(1, WRITES - len(written)))
            busy = [writer for writer in writers.values() if writer.poll() is None]
            if killed < KILLS and busy and os.path.isdir(url):
                chance.choice(busy).kill()
                killed += 1
        stop.touch()
        for reader in readers:
            said, complaint = reader.communicate()
            reads, hits, wrong = said.split(" ", 2)
            assert (wrong, complaint) == ("[]\n", "")
            assert int(reads) > 100
            assert int(hits) > 50
    finally:
        for process in [*writers.values(), *readers]:
            process.kill()
            process.communicate()
    assert killed == KILLS
    assert done >= WRITERS * WRITES - KILLS
    store = Store(url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(store.records())) == 6
    assert store.clear() == 6
    assert os.listdir(url) == []
