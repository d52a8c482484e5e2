"""What was alive when most memory was allocated, from the history that PyTorch's allocator keeps.

The history is `torch.cuda.memory._snapshot()`'s: the blocks that are alive now, and the last events of each card, with
the Python stack of each allocation. It may begin in the middle: of a block from before it only the size is known, if it
was released within it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Frame = Mapping[str, Any]
Event = Mapping[str, Any]
_ROUNDED_TO = 512


@dataclass(frozen=True, slots=True)
class AliveBlock:
    """A block that was alive at some moment.

    Attributes:
        size: bytes that were asked for, rounded up as the allocator does. It may have given a little more.
        event: the number of its allocation in the history; None for one from before it.
        noted: what the process noted with its allocation ("user metadata").
        frames: the Python stack of its allocation, the innermost frame first.
    """

    size: int
    event: int | None = None
    noted: str = ""
    frames: Sequence[Frame] = ()


@dataclass(frozen=True, slots=True)
class AllocatorHistory:
    """The history of one card.

    Attributes:
        events: allocations and releases, in their order.
        before: blocks from before the first of them, by their addresses.
    """

    events: Sequence[Event]
    before: Mapping[int, AliveBlock]

    @classmethod
    def of(cls, snapshot: Mapping[str, Any], device: int) -> AllocatorHistory:
        """The history of a card in what `torch.cuda.memory._snapshot()` returns."""
        events = [each for each in snapshot["device_traces"][device] if each["action"] in ("alloc", "free_requested")]
        before: dict[int, AliveBlock] = {}
        seen = set()
        for event in events:
            if event["action"] == "free_requested" and event["addr"] not in seen:
                before[event["addr"]] = AliveBlock(rounded(event["size"]))
            seen.add(event["addr"])
        for segment in snapshot["segments"]:
            for block in segment["blocks"] if segment["device"] == device else ():
                if block["state"] == "active_allocated" and block["address"] not in seen:
                    size = rounded(block.get("requested_size", block["size"]))
                    before[block["address"]] = AliveBlock(size, frames=block.get("frames", ()))
        return cls(events, before)

    def peak(self, first: int = 0) -> int:
        """After how many events most bytes were allocated, of those from number `first` on."""
        sizes = {address: block.size for address, block in self.before.items()}
        changes = [sum(sizes.values())]
        for event in self.events:
            if event["action"] == "alloc":
                sizes[event["addr"]] = rounded(event["size"])
                changes.append(sizes[event["addr"]])
            else:
                changes.append(-sizes.pop(event["addr"], 0))
        first = min(max(first, 0), len(self.events))
        totals = list(accumulate(changes))[first:]
        return first + totals.index(max(totals))

    def alive(self, after: int) -> dict[int, AliveBlock]:
        """The blocks that are alive after so many events, by their addresses."""
        alive = dict(self.before)
        for number, event in enumerate(self.events[:after]):
            if event["action"] == "alloc":
                noted = event.get("user_metadata") or ""
                alive[event["addr"]] = AliveBlock(rounded(event["size"]), number, noted, event.get("frames", ()))
            else:
                alive.pop(event["addr"], None)
        return alive


def rounded(size: int) -> int:
    """A size as the allocator counts it."""
    return -(-size // _ROUNDED_TO) * _ROUNDED_TO


def line_of(frames: Iterable[Frame], is_library: Callable[[str], bool]) -> str:
    """The innermost frame in the user's own code, such as `model/layers.py:31`; empty if all are of libraries."""
    for frame in frames:
        if not is_library(frame["filename"]):
            return f"{shown_path(frame['filename'])}:{frame['line']}"
    return ""


def shown_path(file: str) -> str:
    """A file as messages name it: from the working folder, where it lies in that, else its last two parts."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here) if file.startswith(here) else os.sep.join(file.split(os.sep)[-2:])
