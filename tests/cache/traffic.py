"""A writer and a reader of a busy cache; test_traffic.py forks many of each."""

from __future__ import annotations

import os
import random
import warnings

from batchfinder.cache import CacheKey, Store
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict
from tests.cache.conftest import FIELDS

KEYS = [CacheKey(**{**FIELDS, "seq_len": length, "total_bytes": 1 << 50}) for length in (64, 128, 256, 320, 384, 512)]


def outcome(seq_len: int, writer: int, turn: int) -> SearchResult:
    """An outcome of which every part says who wrote it, some small and some larger than a disk's page."""
    stamp = seq_len * 10**8 + writer * 10**4 + turn
    seen = Measurement(Verdict.FITS, stamp, stamp, float(stamp))
    out = Measurement(Verdict.OUT_OF_MEMORY, message=f"{stamp} " * (turn % 7 * 40))
    trials = (Trial(stamp, Shape(seq_len), seen), *[Trial(stamp + 1, Shape(seq_len), out)] * (turn % 4))
    return SearchResult(Shape(seq_len), stamp, StopReason.EXACT, seen, trials, "simulated", (str(stamp),))


def write(url: str, writer: int, count: int) -> None:
    """Write `count` outcomes under keys chosen at random; prints one byte after each."""
    store, chance = Store(url), random.Random(writer)
    for turn in range(count):
        key = chance.choice(KEYS)
        store.put(key, outcome(key.seq_len or 0, writer, turn))
        os.write(1, b".")


def read(url: str, stop: str) -> None:
    """Read until the file `stop` is there, with any warning as an error, and compare every part of what is found.

    Prints reads, hits and what was wrong.
    """
    warnings.simplefilter("error")
    store, wrong, reads, hits = Store(url), [], 0, 0
    while not os.path.exists(stop) and not wrong:
        for key in KEYS:
            try:
                found = store.get(key)
            except Exception as error:
                wrong.append(repr(error))
                continue
            reads += 1
            if found is not None:
                hits += 1
                seq_len, rest = divmod(found.max_batch_size, 10**8)
                if found != outcome(seq_len, *divmod(rest, 10**4)) or seq_len != key.seq_len:
                    wrong.append(repr(found))
        if reads % 60 == 0:
            try:
                list(store.records())
            except Exception as error:
                wrong.append(repr(error))
    os.write(1, f"{reads} {hits} {wrong}\n".encode())
