"""A model's cells on simulated cards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from batchfinder.cli.options import Card, allocator_notes
from batchfinder.cli.sweep_cell import Cell, cache_key
from batchfinder.cli.sweep_request import SweepRequest
from batchfinder.devices import Device
from batchfinder.find import find_max_batch_size
from batchfinder.outcome import Outcome, Shape
from batchfinder.search import Capped, Search, Secant
from batchfinder.simulator.predict import predict_max_batch_size
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.tracing.simulation import Simulation

_POINTS, _BEYOND = 12, 1.15
"""Of a curve for the picture: how many steps, and how far beyond the answer, as a multiple of it."""


def simulate_cells(
    model: str,
    simulation: Simulation,
    seq_lens: tuple[int | None, ...],
    request: SweepRequest,
    doing: Callable[[str], object],
    found: Callable[[Cell], object],
) -> None:
    """Find every cell of a model.

    Args:
        model: as it was asked for.
        simulation: of the model.
        seq_lens: of the cells.
        request: the rest.
        doing: is told what is being done.
        found: is told of each cell.

    Raises:
        BatchFinderError: the model could not be recorded.
    """
    facts = simulation.facts()
    left_out = allocator_notes(request.allocator)
    for card in request.cards:
        device = less(card.device, request.reserve_bytes(card))
        for seq_len in seq_lens:
            # A probe of its own for each cell: it collects what this cell's answer leaves out.
            probe = simulation.probe(device, seq_lens, request.allocator)
            doing(cell_name(model, seq_len, card))
            start = time.perf_counter()
            key = cache_key(facts, card, seq_len, request)
            slot = request.cache.slot(key, model) if request.cache is not None else None
            known = slot.get() if slot is not None else None
            outcome = known or search_simulated(probe, Shape(seq_len), request.max_batch_size)
            if slot is not None and known is None:
                slot.put(outcome)
            trials = () if known else outcome.trials
            unscaled = sum((trial.batch_size, seq_len) in probe.traces.unscaled for trial in trials)
            seconds = time.perf_counter() - start
            curve = _curve(probe, outcome) if request.drawn else ()
            found(Cell(model, facts, card, outcome, trials, seconds, known is not None, unscaled, left_out, curve))


def _curve(probe: SimulatedProbe, outcome: Outcome) -> tuple[tuple[int, int], ...]:
    """Peaks from a small size to a little beyond the answer, as on a card without end."""
    most = max(2, math.ceil(_BEYOND * outcome.max_batch_size))
    sizes = sorted({2 + (most - 2) * number // _POINTS for number in range(_POINTS + 1)})
    return tuple((size, probe.needed_bytes(size, outcome.shape)) for size in sizes)


def search_simulated(probe: SimulatedProbe, shape: Shape, max_batch_size: int | None) -> Outcome:
    """The exact answer.

    Args:
        probe: knows the card and the step.
        shape: one sample's shape.
        max_batch_size: the search's cap; None without one.
    """
    search: Search[Any] = Secant(tolerance=0.0, predicted=predict_max_batch_size(probe, shape), margin=0.0)
    if max_batch_size is not None:
        search = Capped(search, max_batch_size)
    return find_max_batch_size(probe, shape, search=search)


def less(device: Device, reserve_bytes: int) -> Device:
    """The device with less of it usable; at least one byte is.

    Args:
        device: any.
        reserve_bytes: what is to stay free.
    """
    return replace(device, usable_bytes=max(1, device.usable_bytes - reserve_bytes))


def cell_name(model: str, seq_len: int | None, card: Card) -> str:
    """What a cell is called in messages.

    Args:
        model: as it was asked for.
        seq_len: tokens per sample; None for data of one fixed shape.
        card: what it is for.
    """
    return f"{model} on {card.name}" if seq_len is None else f"{model} at {seq_len} on {card.name}"
