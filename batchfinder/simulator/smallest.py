"""The smallest card on which a recorded step goes on running."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchfinder.simulator.allocator import UNLIMITED, CachingAllocator
from batchfinder.simulator.memory import DeviceMemory
from batchfinder.simulator.replay import replay
from batchfinder.simulator.rounding import MIN_BLOCK_BYTES, SEGMENT_STEP_BYTES, round_up
from batchfinder.simulator.settings import AllocatorSettings
from batchfinder.simulator.settling import outlook
from batchfinder.simulator.trace import Structure

# How many sizes under the first answer are looked at for a smaller one: 128 MiB.
_LOOKED_AT = 64


def smallest_usable_bytes(
    structure: Structure, sizes: Sequence[int], settings: AllocatorSettings, context_bytes: int = 0
) -> int:
    """The least memory that the allocator has to have for a trace to run, and its last step again and again.

    That is less than the most it reserves on a large card: a full card makes it give its cache back and go on.

    Every segment is a multiple of 2 MiB, so only such sizes are tried. Bisection finds one that runs while the one
    below it does not. A trace that runs on one card may fail on a larger one, where another segment is at hand when a
    block is looked for; so the sizes up to 128 MiB under the answer are tried as well, until none of them runs.

    Args:
        structure: the events.
        sizes: for each block, the bytes asked for.
        settings: the caching allocator's.
        context_bytes: what the card has beside that, which an expandable segment's range is made for.

    Returns:
        A multiple of 2 MiB. The trace was replayed with this much, on which it settles (`outlook`), and with 2 MiB
        less, on which it does not; 0 for a trace that asks for nothing.
    """

    def runs(steps: int) -> bool:
        usable = steps * SEGMENT_STEP_BYTES
        memory = DeviceMemory(usable + context_bytes, usable)
        return outlook(structure, sizes, lambda: CachingAllocator(memory, settings)).fits

    most = replay(structure, sizes, CachingAllocator(UNLIMITED, settings)).max_reserved_bytes
    least = _most_alive(structure, sizes)
    low, high = -(-least // SEGMENT_STEP_BYTES), round_up(most, SEGMENT_STEP_BYTES) // SEGMENT_STEP_BYTES
    floor = low
    while low < high:
        middle = (low + high) // 2
        if runs(middle):
            high = middle
        else:
            low = middle + 1
    while (smaller := _first(runs, max(floor, high - _LOOKED_AT), high)) is not None:
        high = smaller
    return high * SEGMENT_STEP_BYTES


def _first(runs: Callable[[int], bool], low: int, high: int) -> int | None:
    """The first of some sizes, from below, that runs."""
    return next((steps for steps in range(low, high) if runs(steps)), None)


def _most_alive(structure: Structure, sizes: Sequence[int]) -> int:
    """The most bytes alive at one time, each block rounded up as every allocator must: no card can do with less."""
    alive = most = 0
    for event in structure.order:
        if event >= 0:
            alive += round_up(sizes[event], MIN_BLOCK_BYTES)
            most = max(most, alive)
        else:
            alive -= round_up(sizes[~event], MIN_BLOCK_BYTES)
    return most
