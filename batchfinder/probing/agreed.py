"""What a search asks of its process, agreed by all processes that train together: so it is the same search on each.

A size fits where it fits on every rank, its peak is the largest, and what is free is the smallest. Only what steers the
search is agreed; each rank tries sizes under its own memory's limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

from batchfinder.errors import CacheFailed
from batchfinder.find import OutcomeSlot
from batchfinder.outcome import Measurement, Outcome, Shape
from batchfinder.probe import Probe
from batchfinder.probing.agreeing import Ranks
from batchfinder.probing.memory import Memory


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
        ranks: who agrees. `free_bytes` and `room_bytes` are meetings.
    """

    def __init__(self, memory: Memory, ranks: Ranks) -> None:
        self._memory = memory
        self._ranks = ranks
        self.name = memory.name
        self.total_bytes = memory.total_bytes
        self.allowance_bytes = memory.allowance_bytes
        self.enforced = memory.enforced
        self.warms_up = memory.warms_up

    def free_bytes(self) -> int:
        """What training could take now on each rank."""
        return self._ranks.smallest(self._memory.free_bytes())[0]

    def room_bytes(self, held_bytes: int) -> int:
        """What a peak may come to on each rank."""
        return self._ranks.smallest(self._memory.room_bytes(held_bytes))[0]

    def held_bytes(self) -> int:
        """What this process holds now."""
        return self._memory.held_bytes()

    def limited(self, reserve_bytes: int, held_bytes: int) -> AbstractContextManager[None]:
        """This rank's own limit."""
        return self._memory.limited(reserve_bytes, held_bytes)

    def leaves_behind(self, left_bytes: int) -> None:
        """What a try left in this process."""
        self._memory.leaves_behind(left_bytes)

    def reset_peak(self) -> None:
        """Start to watch."""
        self._memory.reset_peak()

    def peaks(self) -> tuple[int | None, int | None]:
        """This rank's own peaks."""
        return self._memory.peaks()

    def retries(self) -> int:
        """This rank's own."""
        return self._memory.retries()


class AgreedSlot:
    """A place for one outcome that the first rank alone reads and writes, for all.

    Args:
        slot: this rank's way there.
        ranks: who agrees. `get` is a meeting.
    """

    def __init__(self, slot: OutcomeSlot, ranks: Ranks) -> None:
        self._slot = slot
        self._ranks = ranks

    def get(self) -> Outcome | None:
        """What the first rank finds.

        Raises:
            CacheFailed: the first rank cannot read it; on every rank.
        """
        found, failed = self._ranks.each(self._read, "looked the answer up")[0]
        if failed is not None:
            raise CacheFailed(*failed)
        return found

    def put(self, outcome: Outcome) -> None:
        """Keep an outcome.

        Raises:
            CacheFailed: the first rank cannot write it; on that rank.
        """
        if self._ranks.rank == 0:
            self._slot.put(outcome)

    def _read(self) -> tuple[Outcome | None, tuple[str, str] | None]:
        if self._ranks.rank > 0:
            return None, None
        try:
            return self._slot.get(), None
        except CacheFailed as error:
            return None, (error.url, error.reason)


def _most(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
