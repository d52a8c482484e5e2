"""Tests of batchfinder/simulator/steady_state.py: a long recording on cards of every size is the answer key."""

from __future__ import annotations

from itertools import pairwise

from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.replay import replay
from batchfinder.simulator.steady_state import MORE_STEPS, outlook
from batchfinder.simulator.trace import Structure, Trace
from batchfinder.units import MIB
from tests.builders import few_layers
from tests.conftest import Record

CARDS = 30


def recorded(record: Record, batch_size: int, steps: int) -> Trace:
    """BERT-base with two layers."""
    return record(lambda: few_layers.build("bert-base"), batch_size, 64, steps=steps)


def cards(trace: Trace) -> list[int]:
    """The card that has just what the step reserves on a large one, and those up to 58 MiB smaller."""
    most = replay(trace.structure, trace.sizes, CachingAllocator()).max_reserved_bytes
    return [most - 2 * MIB * less for less in range(CARDS)]


def settled_by_a_long_recording(trace: Trace, card: int) -> bool:
    """Whether all its steps run, and there is one after the first two in which the cache is kept."""
    timeline = replay(trace.structure, trace.sizes, CachingAllocator(card))
    if not timeline.fits:
        return False
    ends = [stage.num_alloc_retries for stage in timeline.stages if stage.stage == "optimizer"]
    return any(before == after for before, after in pairwise(ends[1:]))


def test_tells_from_two_steps_what_many_do(record: Record) -> None:
    """On every card, a step recorded twice is judged as ten recorded steps are; some run twice and not on."""
    kinds = set()
    for batch_size in (8, 16):
        two, ten = recorded(record, batch_size, 2), recorded(record, batch_size, 2 + MORE_STEPS)
        for card in cards(two):
            once = replay(two.structure, two.sizes, CachingAllocator(card))
            later = outlook(two.structure, two.sizes, lambda card=card: CachingAllocator(card))  # type: ignore[misc]
            assert later.fits == settled_by_a_long_recording(ten, card), (batch_size, card)
            assert not later.timeline.fits or later.timeline == once
            kinds.add((once.fits, once.num_alloc_retries > 0, later.fits))
    assert kinds == {(True, False, True), (True, True, True), (True, True, False), (False, True, False)}


def test_a_trace_without_steps_is_judged_as_it_is() -> None:
    """Where a step cannot be repeated, a trace that ran fits."""
    structure = Structure((0, ~0, 1), (), ("", ""), ("", ""), ("", ""))
    later = outlook(structure, [40 * MIB, 60 * MIB], lambda: CachingAllocator(64 * MIB))
    assert later.timeline.num_alloc_retries == 1
    assert later.timeline.fits
    assert later.settled
