"""Tests of batchfinder/simulator/steady_state.py."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.simulator.alloc_conf import DEFAULT_SETTINGS, AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.replay import replay
from batchfinder.simulator.steady_state import smallest_usable_bytes
from batchfinder.simulator.trace import Structure
from batchfinder.units import MIB

CONTEXT = 300 * MIB


def structure(order: list[int]) -> Structure:
    """A trace without names."""
    blank = ("",) * sum(i >= 0 for i in order)
    return Structure(tuple(order), (), blank, blank, blank)


def fits(order: list[int], sizes: list[int], usable: int, conf: AllocatorSettings = DEFAULT_SETTINGS) -> bool:
    """Whether a trace runs to its end."""
    memory = DeviceMemory(usable + CONTEXT, usable)
    return replay(structure(order), sizes, CachingAllocator(memory, conf)).fits


def test_less_than_is_reserved_on_a_large_card() -> None:
    """A full card gives its cache back, so a step runs on less than it reserves where there is more."""
    order, sizes = [0, ~0, 1, ~1, 2], [40 * MIB, 60 * MIB, 80 * MIB]
    large = CachingAllocator()
    assert replay(structure(order), sizes, large).max_reserved_bytes == 180 * MIB
    assert smallest_usable_bytes(structure(order), sizes, DEFAULT_SETTINGS, CONTEXT) == 80 * MIB


def test_nothing_needs_nothing() -> None:
    """A trace that asks for no bytes runs on none."""
    assert smallest_usable_bytes(structure([0, ~0]), [0], DEFAULT_SETTINGS) == 0


def test_more_memory_is_not_always_better() -> None:
    """Where a larger card fails and a smaller one does not, the smaller one is the answer.

    The 8 MiB block leaves a 20 MiB segment in the cache. With 46 MiB there is room beside it for the 25 MiB, the 12 MiB
    go into the segment, and then only 26 MiB can be given back for 30. With 42 MiB the cache is given back first.
    """
    order, sizes = [0, ~0, 1, 2, ~1, 3], [8 * MIB, 25 * MIB, 12 * MIB, 30 * MIB]
    runs = {usable: fits(order, sizes, usable * MIB) for usable in range(40, 54, 2)}
    assert runs == {40: False, 42: True, 44: True, 46: False, 48: False, 50: True, 52: True}
    assert smallest_usable_bytes(structure(order), sizes, DEFAULT_SETTINGS, CONTEXT) == 42 * MIB


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A random trace in which every release follows its allocation."""
    order: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    for release in draw(st.lists(st.integers(-20, 20), max_size=40)):
        if release >= 0 and live:
            order.append(~live.pop(release % len(live)))
        else:
            live.append(len(sizes))
            order.append(len(sizes))
            sizes.append(draw(st.one_of(st.integers(0, 3 * MIB), st.integers(0, 40 * MIB))))
    return order, sizes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(traces(), st.booleans())
def test_is_the_smallest(trace: tuple[list[int], list[int]], expandable: bool) -> None:
    """The trace runs on a card of that size, fails on one of 2 MiB less, and on any up to 128 MiB under it."""
    order, sizes = trace
    conf = AllocatorSettings(expandable_segments=expandable)
    answer = smallest_usable_bytes(structure(order), sizes, conf, CONTEXT)
    assert answer % (2 * MIB) == 0
    assert fits(order, sizes, answer, conf)
    below = range(max(0, answer - 128 * MIB), answer, 2 * MIB)
    assert not any(fits(order, sizes, usable, conf) for usable in below)
