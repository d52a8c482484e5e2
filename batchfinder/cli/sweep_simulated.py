"""A model's cells on simulated cards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from batchfinder.cli.options import allocator_notes
from batchfinder.cli.sweep_cell import Cell, ModelCells, cache_key
from batchfinder.devices import Device
from batchfinder.outcome import Outcome, Shape
from batchfinder.simulator.probe import SimulatedProbe
from batchfinder.tracing.simulated_search import search_simulated

_POINTS, _BEYOND = 12, 1.15
"""Of a curve for the picture: how many steps, and how far beyond the answer, as a multiple of it."""


def simulate_cells(cells: ModelCells, doing: Callable[[str], object], found: Callable[[Cell], object]) -> None:
    """Find every cell of a model.

    Args:
        cells: what to find.
        doing: is told what is being done.
        found: is told of each cell.

    Raises:
        BatchFinderError: the model could not be recorded.
    """
    model, request = cells.model, cells.request
    facts = cells.simulation.facts()
    left_out = allocator_notes(request.allocator)
    for card in request.cards:
        device = less(card.device, request.reserve_bytes(card))
        for seq_len in cells.seq_lens:
            # A probe of its own for each cell: it collects what this cell's answer leaves out.
            probe = cells.simulation.probe(device, cells.seq_lens, request.allocator)
            doing(cells.name(seq_len, card))
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


def less(device: Device, reserve_bytes: int) -> Device:
    """The device with less of it usable; at least one byte is.

    Args:
        device: any.
        reserve_bytes: what is to stay free.
    """
    return replace(device, usable_bytes=max(1, device.usable_bytes - reserve_bytes))
