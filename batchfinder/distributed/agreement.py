"""Agreement between the ranks of a run: a group of their own, and a probe, a memory and a cache entry for all of them.

A size fits where it fits on every rank, its peak is the largest, and what is free is the smallest, so that the search
is the same on each. Ranks agree over gloo on the host, apart from the training's own group: that waits for no GPU, and
a collective that fails leaves the training's group as it was. What they tell each other is JSON, which runs no code
where it is read, as a pickle would.

A trial is taken by each rank alone: collectives of the model itself run on PyTorch's `fake` backend, so that a rank
that runs out of memory leaves no other waiting. It gives outputs of the right size: `all_gather` copies this rank's
tensor for each rank, `all_reduce` and `broadcast` leave tensors as they are. Only the default group is replaced; groups
that the user's code has made are not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from batchfinder.cache.key import Json
from batchfinder.cache.record import measurement_as_json, measurement_from_json, result_as_json, result_from_json
from batchfinder.cache.store import ResultEntry
from batchfinder.errors import CacheFailed, RankFailed, RankLost
from batchfinder.measure.device_memory import Memory
from batchfinder.probe import Probe
from batchfinder.results import Measurement, SearchResult, Shape

T = TypeVar("T")


class Ranks:
    """The ranks of a run, or a single process, for which each collective returns at once.

    `all_reduce_min`, `all_reduce_sum`, `all_gather`, `all_gather_call` and `barrier_call` are collectives: all ranks
    call them, in the same order. Each raises `RankLost` where another rank has ended, or does not answer in time.

    Attributes:
        rank: this process's rank, from 0.
        size: the world size.
        seconds: time limit of a collective.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, seconds: float = 0.0) -> None:
        self._group = group
        self.seconds = seconds
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def open(cls, timeout: timedelta | None = None) -> Ranks:
        """Open a gloo group of all ranks of `torch.distributed`; a single process where that is not initialized.

        A collective itself: all ranks call it. The group stays open until `close`.

        Args:
            timeout: of a collective, the slowest rank's work before it included; None for PyTorch's default.

        Raises:
            RankLost: the group could not be opened.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        timeout = timeout or dist.default_pg_timeout
        try:
            return cls(dist.new_group(backend="gloo", timeout=timeout), timeout.total_seconds())
        except RuntimeError as error:
            words = f"{_words(error)} (ranks agree over gloo; GLOO_SOCKET_IFNAME says which network it uses)"
            raise RankLost(dist.get_rank(), dist.get_world_size(), timeout.total_seconds(), words) from error

    def close(self) -> None:
        """Leave the group. A rank that waits in a collective gets `RankLost`."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError):  # of a group that has failed
                dist.destroy_process_group(group)

    def all_reduce_min(self, *numbers: int) -> tuple[int, ...]:
        """The least of each number over all ranks; as many on every rank, each within 64 bits."""
        return self._all_reduce(numbers, dist.ReduceOp.MIN)

    def all_reduce_sum(self, *numbers: int) -> tuple[int, ...]:
        """The sum of each number over all ranks; as many on every rank, each sum within 64 bits."""
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def _all_reduce(self, numbers: tuple[int, ...], operation: dist.ReduceOp.RedOpType) -> tuple[int, ...]:
        if self.size == 1:
            return numbers
        agreed = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._collective(lambda group: dist.all_reduce(agreed, operation, group=group))
        return tuple(agreed.tolist())

    def all_gather(self, value: Json) -> list[Any]:
        """The JSON values of all ranks, by rank, as they are read back: tuples are lists then."""
        text = json.dumps(value)
        if self.size == 1:
            return [json.loads(text)]
        data = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        length = torch.tensor([len(data)], device="cpu")
        self._collective(lambda group: dist.all_gather(lengths, length, group=group))
        longest = int(max(lengths))
        texts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        padded = torch.nn.functional.pad(data, (0, longest - len(data)))
        self._collective(lambda group: dist.all_gather(texts, padded, group=group))
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in pairs]

    def barrier_call(self, doing: Callable[[], T], what: str) -> T:
        """Call a function on every rank, wait until all ranks have, and return this rank's result.

        Args:
            doing: calls no collectives.
            what: what it does, as it goes on after "when it": `tried batch size 8`.

        Raises:
            Exception: whatever `doing` raised on this rank, unchanged.
            RankFailed: it raised something on another rank.
        """
        # An interrupt is no Exception: the other ranks get RankLost when this rank closes its group.
        failed: Exception | None = None
        result: list[T] = []
        try:
            result.append(doing())
        except Exception as error:
            failed = error
        try:
            if self.size > 1:
                words = None if failed is None else f"{type(failed).__name__}: {failed}"
                for rank, other in enumerate(self.all_gather(words)):
                    if other is not None and failed is None:
                        raise RankFailed(rank, self.size, what, other)
            if failed is not None:
                raise failed
        finally:
            failed = None  # its traceback holds this frame
        return result[0]

    def all_gather_call(self, doing: Callable[[], Json], what: str) -> list[Any]:
        """Like `barrier_call`, and returns the results of all ranks, by rank.

        Args:
            doing: returns a JSON value; calls no collectives.
            what: as for `barrier_call`.
        """
        return self.all_gather(self.barrier_call(doing, what))

    def _collective(self, collective: Callable[[dist.ProcessGroup], object]) -> None:
        try:
            if self._group is None:
                raise RuntimeError("this rank has left the group")
            collective(self._group)
        except RuntimeError as error:
            raise RankLost(self.rank, self.size, self.seconds, _words(error)) from error


def _words(error: RuntimeError) -> str:
    """gloo's message without its advice."""
    return str(error).partition(". This is typically")[0].rstrip(".")


def agree(seen: list[Measurement]) -> Measurement:
    """The measurement of one size that holds for all ranks, of each rank's own, by rank.

    Returns:
        The largest peaks; where it failed, the verdict of the first rank it failed on, which the message names.
    """
    if len(seen) == 1:
        return seen[0]
    seconds = max(one.seconds for one in seen)
    for rank, one in enumerate(seen):
        if not one.fits:
            return replace(one, seconds=seconds, message=f"on rank {rank}: {one.message}")
    largest: dict[str, Any] = {}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "resting_bytes", "forward_bytes"):
        known = [nbytes for one in seen if (nbytes := getattr(one, name)) is not None]
        largest[name] = max(known, default=None)
    return replace(seen[0], seconds=seconds, **largest)


class AgreedProbe:
    """A probe that tries each size on every rank, waiting for no other, and returns one measurement on all of them."""

    def __init__(self, probe: Probe, ranks: Ranks) -> None:
        self._probe = probe
        self._ranks = ranks
        self.source = probe.source
        self.unmodelled = probe.unmodelled

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        seen = self._ranks.all_gather_call(
            lambda: measurement_as_json(self._probe(batch_size, shape)), f"tried batch size {batch_size}"
        )
        return agree([measurement_from_json(row) for row in seen])


@dataclass
class AgreedMemory:
    """This rank's device memory, of which as much is free as on the rank with the least.

    `free_bytes` and `max_peak_bytes` are collectives; all else is this rank's own.
    """

    _memory: Memory
    _ranks: Ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def free_bytes(self) -> int:
        return self._ranks.all_reduce_min(self._memory.free_bytes())[0]

    def max_peak_bytes(self, held_bytes: int) -> int:
        return self._ranks.all_reduce_min(self._memory.max_peak_bytes(held_bytes))[0]


@dataclass
class AgreedEntry:
    """A cache entry that rank 0 alone reads and writes, for all ranks."""

    _entry: ResultEntry
    _ranks: Ranks

    def get(self) -> SearchResult | None:
        """What rank 0 reads.

        Raises:
            CacheFailed: rank 0 cannot read it; on every rank.
        """

        def read() -> Json:
            try:
                found = self._entry.get() if self._ranks.rank == 0 else None
                return {"found": None if found is None else result_as_json(found)}
            except CacheFailed as error:
                return {"failed": [error.url, error.reason]}

        heard = self._ranks.all_gather_call(read, "read the cache")[0]
        if "failed" in heard:
            raise CacheFailed(*heard["failed"])
        return None if heard["found"] is None else result_from_json(heard["found"])

    def put(self, result: SearchResult) -> None:
        if self._ranks.rank == 0:
            self._entry.put(result)


@contextmanager
def local_collectives() -> Iterator[None]:
    """Make the default group one of the fake backend. A single process keeps its own."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group = c10d._get_default_group()
    rank, size = group.rank(), group.size()
    new_group: Any = c10d._new_process_group_helper  # `dist.new_group` would wait for the other ranks
    timeout = dist.default_pg_timeout
    fake, _ = new_group(size, rank, list(range(size)), "fake", FakeStore(), "batchfinder", timeout=timeout)
    c10d._world.pg_group_ranks[fake] = {member: member for member in range(size)}
    c10d.GroupMember.WORLD = fake
    try:
        yield
    finally:
        c10d.GroupMember.WORLD = group
        dist.destroy_process_group(fake)


def leave_groups() -> None:
    """In a forked child, which cannot use its parent's connections: `torch.distributed` is not initialized here."""
    if dist.is_available() and dist.is_initialized():
        c10d.GroupMember.WORLD = None


def extra_groups() -> int:
    """How many process groups of several ranks this process is in besides the default one."""
    return sum(group.size() > 1 for group in c10d._world.pg_map if group is not c10d._get_default_group())
