"""The steady state, the repeated step and the smallest card."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.simulator.alloc_conf import DEFAULT_SETTINGS, AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.replay import replay
from batchfinder.simulator.steady_state import (
    MORE_STEPS,
    repeat_last_step,
    simulate_steady_state,
    smallest_usable_bytes,
)
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.units import MIB
from tests.builders import few_layers, small
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


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tells_from_two_steps_what_many_do(record: Record) -> None:
    """On every card, a step recorded twice is judged as ten recorded steps are; some run twice and not on."""
    kinds = set()
    for batch_size in (8, 16):
        two, ten = recorded(record, batch_size, 2), recorded(record, batch_size, 2 + MORE_STEPS)
        for card in cards(two):
            once = replay(two.structure, two.sizes, CachingAllocator(card))
            later = simulate_steady_state(two.structure, two.sizes, lambda card=card: CachingAllocator(card))  # type: ignore[misc]
            assert later.fits == settled_by_a_long_recording(ten, card), (batch_size, card)
            assert not later.timeline.fits or later.timeline == once
            kinds.add((once.fits, once.num_alloc_retries > 0, later.fits))
    assert kinds == {(True, False, True), (True, True, True), (True, True, False), (False, True, False)}


def random_steps(chance: random.Random) -> tuple[TraceStructure, list[int]]:
    """Two steps alike, of blocks that go in their step or, as gradients do, in the next.

    Some are free only some allocations later, if at all, as another stream has used them.
    """
    sizes = [chance.choice([chance.randrange(1, 4), chance.randrange(4, 60)]) * MIB // 2 for _ in range(12)]
    kept = [block for block in range(12) if chance.random() < 0.3]
    step: list[tuple[int, bool]] = []
    for block in range(12):
        step.append((block, True))
        gone = [block for block, taken in step if not taken]
        step += [(each, False) for each in range(block + 1) if each not in (*kept, *gone) and chance.random() < 0.4]
    gone = [block for block, taken in step if not taken]
    step += [(block, False) for block in range(12) if block not in (*kept, *gone)]
    order: list[int] = []
    marks = []
    for number in range(2):
        marks.append(StageMark(len(order), number, "forward"))
        order += [12 * number + block if taken else ~(12 * number + block) for block, taken in step]
        marks.append(StageMark(len(order), number, "optimizer"))
        order += [~(12 * (number - 1) + block) for block in kept if number]
    marks.append(StageMark(len(order), 1, "end"))
    order += [~(12 + block) for block in kept]
    names = tuple(f"operator {block}" for block in range(12)) * 2
    waits = []
    for at, event in enumerate(order):
        if event < 0 and chance.random() < 0.1:
            later = [position for position in range(at + 1, len(order)) if order[position] >= 0]
            waits.append((chance.choice([*later[:6], len(order)]), ~event))
    structure = TraceStructure(tuple(order), tuple(marks), names, names, names, free_completed=tuple(sorted(waits)))
    return structure, sizes * 2


def test_goes_on_as_if_it_had_begun_with_all_steps() -> None:
    """What is replayed from the end of the recorded steps on is what a replay of all steps from the start shows."""
    chance, kinds = random.Random(15), Counter[str]()
    for _ in range(45):
        events, sizes = random_steps(chance)
        most = replay(events, sizes, CachingAllocator()).max_reserved_bytes
        for card in range(most - 24 * MIB, most + 1, 2 * MIB):
            once, seen = replay(events, sizes, CachingAllocator(card)), None
            later = simulate_steady_state(events, sizes, lambda card=card: CachingAllocator(card))  # type: ignore[misc]
            if once.fits and once.num_alloc_retries:
                more, origins = repeat_last_step(events, MORE_STEPS) or (events, ())
                seen = replay(more, [sizes[i] for i in origins], CachingAllocator(card))
                ends = [stage.num_alloc_retries for stage in seen.stages if stage.stage == "optimizer"]
                kept = any(before == after for before, after in pairwise(ends[1:]))
                assert later.fits == kept
                once = once if kept or seen.fits else seen
                kinds["kept" if kept else "thrashes" if seen.fits else "fails later"] += 1
            assert later.timeline == once
    assert min(kinds[kind] for kind in ("kept", "thrashes", "fails later")) > 0, kinds


def test_a_trace_without_steps_is_judged_as_it_is() -> None:
    """Where a step cannot be repeated, a trace that ran fits."""
    structure = TraceStructure((0, ~0, 1), (), ("", ""), ("", ""), ("", ""))
    later = simulate_steady_state(structure, [40 * MIB, 60 * MIB], lambda: CachingAllocator(64 * MIB))
    assert later.timeline.num_alloc_retries == 1
    assert later.timeline.fits
    assert later.settled


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bert, a scaler": ("bert-base", 32, {"precision": "16-mixed"}),
    "gpt2, accumulated": ("gpt2", 32, {"micro_batches": 2, "optimizer": "adamw-fused"}),
    "resnet, momentum": ("resnet50", 64, {"optimizer": "sgd-momentum"}),
}


@pytest.mark.parametrize(
    "case",
    [first := next(iter(CASES)), *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != first)],
)
def test_is_what_more_steps_record(case: str, record: Record) -> None:
    """Two steps, the last one taken three more times, are the five that a longer recording has, block by block."""
    spec, length, how = CASES[case]
    two, five = (record(lambda: few_layers.build(spec), 3, length, steps=steps, **how) for steps in (2, 5))
    longer = repeat_last_step(two.structure, 3)
    assert longer is not None
    structure, origins = longer
    assert structure == five.structure
    assert tuple(two.sizes[block] for block in origins) == five.sizes


def test_none_more(record: Record) -> None:
    """No times more is the trace itself."""
    trace = record(small.mlp, 8)
    assert repeat_last_step(trace.structure, 0) == (trace.structure, tuple(range(len(trace.sizes))))


def test_a_single_pass_is_not_repeated(record: Record) -> None:
    """What a second one would release is not known."""
    assert repeat_last_step(record(small.mlp, 8, mode="inference").structure, 3) is None
    assert repeat_last_step(TraceStructure((), (), (), (), ()), 3) is None


@pytest.mark.parametrize("released", [0, 1])
def test_what_has_no_place_is_not_guessed(released: int) -> None:
    """A step that releases the model's own memory, or what none of its blocks replaces, cannot be repeated.

    Nor can one in which the host has waited for what another stream does with such a block.
    """
    marks = (StageMark(0, -1, "model"), StageMark(1, 0, "forward"), StageMark(2, 1, "forward"), StageMark(4, 1, "end"))
    names = ("model", "first", "second")
    structure = TraceStructure((0, 1, 2, ~released), marks, names, ("",) * 3, ("",) * 3)
    assert repeat_last_step(structure, 1) is None
    marks = (*marks[:2], StageMark(3, 1, "forward"), marks[3])
    before = replace(structure, order=(0, 1, ~released, 2), marks=marks)
    assert repeat_last_step(before, 1) is not None
    assert repeat_last_step(replace(before, free_completed=((3, released),)), 1) is None


@pytest.mark.parametrize("tail", [(), (~0,)])
def test_what_another_stream_has_used_in_repeated_steps(tail: tuple[int, ...]) -> None:
    """One block of each step is free as the next one begins, one within it; of the last step none is known to be."""
    marks = (StageMark(0, -1, "model"), StageMark(1, 0, "forward"), StageMark(5, 1, "forward"), StageMark(9, 1, "end"))
    order = (0, 1, ~1, 2, ~2, 3, ~3, 4, ~4, *tail)
    names = ("model", *("first", "second") * 2)
    waits = ((5, 1), (7, 2), (len(order), 3), (len(order), 4))
    recorded_twice = TraceStructure(order, marks, names, names, names, (0, 1, 1, 1, 1), waits)
    longer = repeat_last_step(recorded_twice, 2)
    assert longer is not None
    structure, origins = longer
    assert structure.order == (*order[:9], 5, ~5, 6, ~6, 7, ~7, 8, ~8, *tail)
    assert origins == (0, 1, 2, 3, 4, 3, 4, 3, 4)
    end = len(structure.order)
    assert structure.free_completed == ((5, 1), (7, 2), (9, 3), (11, 4), (13, 5), (15, 6), (end, 7), (end, 8))


CONTEXT = 300 * MIB


def structure(order: list[int]) -> TraceStructure:
    """A trace without names."""
    blank = ("",) * sum(i >= 0 for i in order)
    return TraceStructure(tuple(order), (), blank, blank, blank)


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
