from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from batchfinder.cache import Store

SCRIPT = Path(__file__).with_name("traffic.py")
WRITERS, WRITES, KILLS, READERS = 16, 200, 24, 2


def _start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_damaged_record_is_ever_returned(tmp_path):
    """16 processes x 200 writes to one cache, 24 of them killed on the way: readers meet whole records only."""
    url, stop, chance = tmp_path / "cache", tmp_path / "stop", random.Random(7)
    readers = [_start("read", url, stop) for _ in range(READERS)]
    writers = {number: _start("write", url, number, WRITES) for number in range(WRITERS)}
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
                    writers[number] = _start("write", url, number, max(1, WRITES - len(written)))
            busy = [writer for writer in writers.values() if writer.poll() is None]
            if killed < KILLS and busy and os.path.isdir(url):
                chance.choice(busy).kill()
                killed += 1
        stop.touch()
        for reader in readers:
            said, complaint = reader.communicate(timeout=300)
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
