"""What each rank does in the tests of batchfinder/distributed/agreement.py: cases that `tests/forks.py` runs."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from batchfinder.cache.record import measurement_as_json, measurement_from_json
from batchfinder.distributed.agreement import AgreedEntry, AgreedProbe, Ranks, agree
from batchfinder.errors import CacheFailed, RankLost
from batchfinder.probe import FunctionProbe
from batchfinder.results import Measurement, SearchResult, Shape, StopReason, Trial, Verdict
from tests.forked import at_once


def prepare() -> None:
    """All is imported."""
    torch.set_num_threads(1)


def respond(request: dict[str, Any]) -> list[Any]:
    """The results of a case's ranks: `{"size": 2, "case": "numbers"}`."""
    return at_once(request["size"], CASES[request["case"]])


def _ended(doing: Callable[[], Any]) -> str:
    try:
        return repr(doing())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def numbers(rank: int) -> list[Any]:
    """Agree on numbers and things."""
    with closing(Ranks.open()) as ranks:
        assert (ranks.rank, ranks.size) == (rank, torch.distributed.get_world_size())
        large = (1 << 62) - rank
        return [ranks.all_reduce_min(rank, -rank, large), ranks.all_gather({"rank": rank})]


def calls(rank: int) -> list[Any]:
    """Do something on every rank, which fails on the last."""

    def fails() -> int:
        if rank == ranks.size - 1:
            raise ValueError("the labels are wrong")
        return rank

    with closing(Ranks.open()) as ranks:
        well = ranks.barrier_call(lambda: 10 * rank, "counted")
        every = ranks.all_gather_call(lambda: 10 * rank, "counted")
        failed = [
            _ended(lambda: ranks.barrier_call(fails, "counted")),
            _ended(lambda: ranks.all_gather_call(fails, "counted")),
        ]
        return [well, every, *failed, ranks.all_gather("still here")]


def leaves(rank: int) -> list[Any]:
    """One rank leaves the group, and stays in the training's own."""
    ranks = Ranks.open()
    ranks.all_gather(rank)
    torch.distributed.barrier()  # all have left the first collective
    if rank == 1:
        ranks.close()
        ended = ["left"]
    else:
        ended = [
            _ended(lambda: ranks.all_gather(rank)).partition(": [")[0],
            _ended(lambda: ranks.all_reduce_min(1))[:8],
        ]
        ranks.close()
    torch.distributed.barrier()
    return [*ended, _ended(lambda: ranks.all_gather(rank))]


def late(rank: int) -> Any:
    """One rank is late for a collective, and the other has given up."""
    ended: Any = None
    ranks = Ranks.open(timedelta(seconds=1))
    if rank == 0:
        try:
            ranks.barrier_call(lambda: None, "tried batch size 8")
        except RankLost as error:
            found = vars(error)
            ended = [found, "Timed out" in found.pop("detail")]
    torch.distributed.barrier()
    return ended


def absent(rank: int) -> list[Any]:
    """One rank does not open a group with the others, and goes on with the training's own."""
    ended = "" if rank == 1 else _ended(lambda: Ranks.open(timedelta(seconds=1)))
    torch.distributed.barrier()
    return [ended.partition(":")[0], ended.partition(" (")[2].partition(")")[0]]


FITS = Measurement(Verdict.FITS, None, 5 << 40, 0.1, resting_bytes=1, forward_bytes=0)
FAILS = Measurement(Verdict.OUT_OF_MEMORY, seconds=1.0, message="kein Speicher für 2 GiB", needed_bytes=7)
TRIALS = (Trial(5, Shape(8), FITS), Trial(6, Shape(8), FAILS))
FOUND = SearchResult(Shape(8), 5, StopReason.EXACT, FITS, TRIALS, unmodelled=("none",), free_bytes=9)


class Place:
    """A cache entry that counts its calls and may fail."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.calls = fails, 0
        self.outcome: SearchResult | None = None

    def get(self) -> SearchResult | None:
        """Look."""
        self.calls += 1
        if self.fails:
            raise CacheFailed("s3://bucket", "no credentials")
        return FOUND

    def put(self, outcome: SearchResult) -> None:
        """Keep."""
        self.calls += 1
        self.outcome = outcome


def places(rank: int) -> list[Any]:
    """The first rank alone reads and writes."""
    with closing(Ranks.open()) as ranks:
        works, fails = Place(False), Place(rank == 0)
        entry = AgreedEntry(works, ranks)
        found = entry.get()
        assert found == FOUND
        entry.put(found)
        return [found.max_batch_size, works.calls, _ended(AgreedEntry(fails, ranks).get)]


def probes(rank: int) -> list[Any]:
    """Each rank has as much more room as its number."""
    with closing(Ranks.open()) as ranks:
        probe = AgreedProbe(FunctionProbe(lambda size, shape: 10 * size + rank, capacity_bytes=100 + 10 * rank), ranks)
        seen = [probe(size, Shape()) for size in (9, 10, 11)]
        return [
            [one.fits for one in seen],
            [one.message.partition(":")[0] for one in seen],
            seen[0].peak_allocated_bytes,
        ]


def readings(rank: int) -> list[Any]:
    """The largest of what is known."""
    with closing(Ranks.open()) as ranks:
        mine = Measurement(Verdict.FITS, None, 10 + rank, 1.0 + rank, resting_bytes=None if rank else 5)
        gathered = ranks.all_gather(measurement_as_json(mine))
        seen = asdict(agree([measurement_from_json(row) for row in gathered]))
        return [seen["peak_allocated_bytes"], seen["peak_reserved_bytes"], seen["seconds"], seen["resting_bytes"]]


def audited(rank: int) -> list[Any]:
    """What is unpickled while ranks agree: functions and classes, which a pickle may call."""
    found: list[Any] = []
    sys.addaudithook(lambda event, names: found.append(names) if event == "pickle.find_class" else None)
    pickle.loads(pickle.dumps(Verdict))
    for case in (numbers, calls, places, probes, readings):
        case(rank)
    return [".".join(names) for names in found]


CASES: dict[str, Callable[[int], Any]] = {
    case.__name__: case for case in (numbers, calls, leaves, late, absent, places, probes, readings, audited)
}
