"""The processes that train together, and how they agree on what each of them does next.

Where one of several processes runs out of memory, the others must hear of it before they wait for its gradients. They
meet over a group of the host's own (gloo), apart from the one that training uses: a meeting waits for nothing on a GPU,
and one that fails leaves the training's group as it was.

What a search asks of its process, agreed by all processes that train together: so it is the same search on each.

A size fits where it fits on every rank, its peak is the largest, and what is free is the smallest. Only what steers the
search is agreed; each rank tries sizes under its own memory's limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from batchfinder.errors import CacheFailed, RankFailed, RankLost
from batchfinder.find import ResultEntry
from batchfinder.measure.device_memory import Memory
from batchfinder.probe import Probe
from batchfinder.results import Measurement, SearchResult, Shape

T = TypeVar("T")


class Ranks:
    """The processes that train together; or a single one, for which each meeting is over at once.

    `smallest`, `gathered`, `each` and `together` are meetings: all ranks call them, in the same order. A
    rank that does not come within the time limit, or whose process has ended, is an error on all others.

    Args:
        group: a group of all processes on the host, from `open`; None for a single process.
        seconds: how long a meeting may take.

    Attributes:
        rank: this process's number, from 0.
        size: how many there are.
        seconds: how long a meeting may take.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, seconds: float = 0.0) -> None:
        self._group = group
        self.seconds = seconds
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def open(cls, timeout: timedelta | None = None) -> Ranks:
        """A group of all processes of `torch.distributed`; a single process where it is not in use.

        All processes call this at the same time. The group is theirs until `close`.

        Args:
            timeout: how long a meeting may take, the slowest rank's work before it included; None for PyTorch's own.
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
        """Leave the group. Whoever still waits in a meeting is told that this rank is lost."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError):  # of a group that has failed
                dist.destroy_process_group(group)

    def smallest(self, *numbers: int) -> tuple[int, ...]:
        """Of each number the smallest that any rank has.

        Args:
            numbers: as many on every rank, each within 64 bits.

        Raises:
            RankLost: a rank has ended, or does not answer within the time limit.
        """
        if self.size == 1:
            return numbers
        agreed = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._meet(lambda: dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._open_group()))
        return tuple(agreed.tolist())

    def gathered(self, thing: T) -> list[T]:
        """What every rank has, in their order.

        Args:
            thing: anything that can be pickled.

        Raises:
            RankLost: a rank has ended, or does not answer within the time limit.
        """
        if self.size == 1:
            return [thing]
        things: list[T] = [thing] * self.size
        self._meet(lambda: dist.all_gather_object(things, thing, group=self._open_group()))
        return things

    def together(self, doing: Callable[[], T], what: str) -> T:
        """Do something on every rank, and return what this rank's came to, once all ranks are through with it.

        Args:
            doing: does it; holds no meetings.
            what: what it does, as it goes on after "when it": `tried batch size 8`.

        Raises:
            Exception: whatever `doing` raised on this rank, unchanged.
            RankFailed: another rank raised something.
            RankLost: a rank has ended, or does not answer within the time limit.
        """
        # An interrupt is no Exception: nobody is told, and the others are when this rank's group is closed.
        failed: Exception | None = None
        result: list[T] = []
        try:
            result.append(doing())
        except Exception as error:
            failed = error
        try:
            if self.size > 1:
                words = None if failed is None else f"{type(failed).__name__}: {failed}"
                for rank, other in enumerate(self.gathered(words)):
                    if other is not None and failed is None:
                        raise RankFailed(rank, self.size, what, other)
            if failed is not None:
                raise failed
        finally:
            failed = None  # its traceback holds this frame
        return result[0]

    def each(self, doing: Callable[[], T], what: str) -> list[T]:
        """Like `together`, and returns what every rank's came to, in their order.

        Args:
            doing: does it, and returns something that can be pickled; holds no meetings.
            what: what it does.
        """
        return self.gathered(self.together(doing, what))

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this rank has left the group")
        return self._group

    def _meet(self, meeting: Callable[[], object]) -> None:
        try:
            meeting()
        except RuntimeError as error:
            raise RankLost(self.rank, self.size, self.seconds, _words(error)) from error


def _words(error: RuntimeError) -> str:
    """What gloo says, without its advice."""
    return str(error).partition(". This is typically")[0].rstrip(".")


def agree(seen: list[Measurement]) -> Measurement:
    """The measurement that holds for all ranks.

    Args:
        seen: what each rank measured of the same size, in their order.

    Returns:
        The largest peaks and readings; where it failed, the verdict of the first rank it failed on, which the message
        names.
    """
    if len(seen) == 1:
        return seen[0]
    failed = [(rank, one) for rank, one in enumerate(seen) if not one.fits]
    seconds = max(one.seconds for one in seen)
    if failed:
        rank, first = failed[0]
        return replace(first, seconds=seconds, message=f"on rank {rank}: {first.message}")
    return replace(
        seen[0],
        peak_allocated_bytes=_most(one.peak_allocated_bytes for one in seen),
        peak_reserved_bytes=_most(one.peak_reserved_bytes for one in seen),
        seconds=seconds,
        resting_bytes=_most(one.resting_bytes for one in seen),
        forward_bytes=_most(one.forward_bytes for one in seen),
    )


class AgreedProbe:
    """Tries a size on every rank, and gives each rank the same measurement.

    Args:
        probe: this rank's, which waits for no other.
        ranks: who agrees.
    """

    def __init__(self, probe: Probe, ranks: Ranks) -> None:
        self._probe = probe
        self._ranks = ranks
        self.source = probe.source
        self.unmodelled = probe.unmodelled

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size.

        Args:
            batch_size: samples in the micro-batch.
            shape: one sample's shape.

        Raises:
            Exception: whatever this rank's probe raised, unchanged.
            RankFailed: another rank's probe raised something.
            RankLost: a rank has ended, or does not answer within the time limit.
        """
        return agree(self._ranks.each(lambda: self._probe(batch_size, shape), f"tried batch size {batch_size}"))


class AgreedMemory:
    """A device's memory whose free bytes are the least that any rank has; all else is this rank's own.

    Args:
        memory: this rank's device's.
        ranks: who agrees. `free_bytes` and `max_peak_bytes` are meetings.
    """

    def __init__(self, memory: Memory, ranks: Ranks) -> None:
        self._memory = memory
        self._ranks = ranks
        self.name = memory.name
        self.total_bytes = memory.total_bytes
        self.allowance_bytes = memory.allowance_bytes
        self.has_hard_limit = memory.has_hard_limit
        self.first_step_overhead = memory.first_step_overhead

    def free_bytes(self) -> int:
        """What training could take now on each rank."""
        return self._ranks.smallest(self._memory.free_bytes())[0]

    def max_peak_bytes(self, held_bytes: int) -> int:
        """What a peak may come to on each rank."""
        return self._ranks.smallest(self._memory.max_peak_bytes(held_bytes))[0]

    def held_bytes(self) -> int:
        """What this process holds now."""
        return self._memory.held_bytes()

    def limited(self, reserve_bytes: int, held_bytes: int) -> AbstractContextManager[None]:
        """This rank's own limit."""
        return self._memory.limited(reserve_bytes, held_bytes)

    def record_leak(self, left_bytes: int) -> None:
        """What a try left in this process."""
        self._memory.record_leak(left_bytes)

    def reset_peak(self) -> None:
        """Start to watch."""
        self._memory.reset_peak()

    def peaks(self) -> tuple[int | None, int | None]:
        """This rank's own peaks."""
        return self._memory.peaks()

    def retries(self) -> int:
        """This rank's own."""
        return self._memory.retries()


class AgreedEntry:
    """A place for one outcome that the first rank alone reads and writes, for all.

    Args:
        slot: this rank's way there.
        ranks: who agrees. `get` is a meeting.
    """

    def __init__(self, slot: ResultEntry, ranks: Ranks) -> None:
        self._slot = slot
        self._ranks = ranks

    def get(self) -> SearchResult | None:
        """What the first rank finds.

        Raises:
            CacheFailed: the first rank cannot read it; on every rank.
        """
        found, failed = self._ranks.each(self._read, "looked the answer up")[0]
        if failed is not None:
            raise CacheFailed(*failed)
        return found

    def put(self, outcome: SearchResult) -> None:
        """Keep an outcome.

        Raises:
            CacheFailed: the first rank cannot write it; on that rank.
        """
        if self._ranks.rank == 0:
            self._slot.put(outcome)

    def _read(self) -> tuple[SearchResult | None, tuple[str, str] | None]:
        if self._ranks.rank > 0:
            return None, None
        try:
            return self._slot.get(), None
        except CacheFailed as error:
            return None, (error.url, error.reason)


def _most(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
