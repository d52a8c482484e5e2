"""The processes that train together, and how they agree on what each of them does next.

Where one of several processes runs out of memory, the others must hear of it before they wait for its gradients. They
meet over a group of the host's own (gloo), apart from the one that training uses: a meeting waits for nothing on a GPU,
and one that fails leaves the training's group as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from batchfinder.errors import RankFailed, RankLost

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
