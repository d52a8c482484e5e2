"""The answer for one shape, on memory curves and a memory that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from batchfinder.accumulation import AccumulationPlan
from batchfinder.errors import OutOfMemory
from batchfinder.outcome import Measurement, Outcome, Shape, Stop, Verdict
from batchfinder.probing.answering import Answering
from batchfinder.probing.known import Limits, lower

MESSAGE = "no room"


class Card:
    """A memory of 1000 bytes, enforced or judged afterwards; `leaks` bytes are gone for good with each try."""

    name, total_bytes, allowance_bytes = "made up", 1000, 1000

    def __init__(self, enforced: bool = True, leaks: int = 0, free: int = 1000) -> None:
        self.enforced, self.warms_up = enforced, leaks > 0
        self.leaks, self.free, self.tried = leaks, free, 0

    def free_bytes(self) -> int:
        return self.free

    def room_bytes(self, held_bytes: int) -> int:
        return self.free - self.leaks * self.tried + held_bytes

    def held_bytes(self) -> int:
        return 0

    @contextmanager
    def limited(self, reserve_bytes: int, held_bytes: int) -> Iterator[None]:
        yield

    def reset_peak(self) -> None:
        """Nothing to forget."""

    def peaks(self) -> tuple[int | None, int | None]:
        return None, None

    def retries(self) -> int:
        return 0


class Slot:
    """A place for one outcome."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None

    def get(self) -> Outcome | None:
        return self.outcome

    def put(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Curve:
    """Takes `peak(batch_size)` bytes of a card."""

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(self, card: Card, peak: Callable[[int], int], reserve: int = 0) -> None:
        self.card, self.peak, self.reserve = card, peak, reserve
        self.sizes: list[int] = []

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        self.sizes.append(batch_size)
        peak, room = self.peak(batch_size), self.card.room_bytes(0) - self.reserve
        self.card.tried += 1
        if self.card.enforced and peak > room:
            return Measurement(Verdict.OUT_OF_MEMORY, message=MESSAGE)
        return Measurement(Verdict.FITS, peak_reserved_bytes=peak)


def answering(card: Card, curve: Curve, cap: int | None = None, reserve: int = 0, **options: Any) -> Answering:
    """Exact answers."""
    return Answering(card, Limits(cap, 0.0, reserve, reserve), lambda shape: (curve, 0), **options)


@pytest.mark.parametrize("enforced", [True, False])
@pytest.mark.parametrize("reserve", [0, 100])
def test_the_largest_size_whose_peak_leaves_the_reserve(enforced: bool, reserve: int) -> None:
    """Whether going beyond fails by itself or is judged from the peak."""
    card = Card(enforced)
    curve = Curve(card, lambda size: 100 + 7 * size, reserve)
    found = answering(card, curve, reserve=reserve).find(Shape(), None)
    assert found.outcome.max_batch_size == (900 - reserve) // 7
    assert [trial.batch_size for trial in found.outcome.trials] == curve.sizes


def test_a_known_answer_is_used_while_as_much_is_free() -> None:
    """With less free it is tried once; where it fails, what is found below it replaces the record."""
    slot = Slot()
    card = Card()
    curve = Curve(card, lambda size: 100 + 7 * size)
    answering(card, curve).find(Shape(), slot)
    curve.sizes.clear()
    again = answering(card, curve).find(Shape(), slot)
    assert (again.outcome.max_batch_size, again.outcome.source, curve.sizes) == (128, "cache", [])
    card.free = 980
    less = answering(card, curve).find(Shape(), slot)
    assert (curve.sizes[0], less.outcome.max_batch_size, less.outcome.source) == (128, 125, "measured")
    assert slot.outcome is not None
    assert (slot.outcome.max_batch_size, slot.outcome.free_bytes, slot.outcome.source) == (125, 980, "measured")


def test_a_lowered_record_is_tried_at_a_multiple() -> None:
    """5 % less than a multiple of 8 is none."""
    slot, card = Slot(), Card()
    curve = Curve(card, lambda size: 100 + 7 * size)
    answering(card, curve, multiple_of=8).find(Shape(), slot)
    assert lower(slot, 128, MESSAGE) == 121
    curve.sizes.clear()
    found = answering(card, curve, multiple_of=8).find(Shape(), slot)
    assert (curve.sizes, found.outcome.max_batch_size, found.outcome.source) == ([120], 120, "cache")


def test_what_tries_leave_behind_lowers_the_answer() -> None:
    """The answer is a size that runs with the room that is left at the end of the search."""
    card = Card(leaks=4)
    curve = Curve(card, lambda size: 100 + 7 * size)
    found = answering(card, curve).find(Shape(), None)
    assert found.outcome.max_batch_size == curve.sizes[-1]
    assert curve.peak(found.outcome.max_batch_size) <= card.room_bytes(0) + card.leaks
    assert found.outcome.stop is Stop.TOLERANCE


def test_a_plans_micro_batch_is_tried_itself() -> None:
    """A smaller size may take more: the next divisor that runs is taken."""
    card = Card()
    curve = Curve(card, lambda size: 2000 if size == 90 else 100 + 7 * size)
    found = answering(card, curve, cap=180, target_batch_size=180).find(Shape(), None)
    assert (found.outcome.max_batch_size, found.plan) == (128, AccumulationPlan(180, 60, 3))
    assert curve.sizes[-2:] == [90, 60]


def test_nothing_fits_now_and_at_the_next_start() -> None:
    """The device's words stand in both messages, and the second start tries nothing."""
    slot, card = Slot(), Card()
    curve = Curve(card, lambda size: 2000)
    for tries in (1, 1):
        with pytest.raises(OutOfMemory) as caught:
            answering(card, curve).find(Shape(512), slot)
        assert str(caught.value) == (
            "batch size 1 does not fit: no room. Try a smaller model or sequences shorter than 512, a lower precision, "
            "activation checkpointing or an optimizer with less state."
        )
        assert len(curve.sizes) == tries
