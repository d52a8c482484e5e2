"""The largest batch on a simulated card."""

from __future__ import annotations

from typing import Any

from batchfinder.find import find_max_batch_size
from batchfinder.outcome import Outcome, Shape
from batchfinder.search import Capped, Search, Secant
from batchfinder.simulator.predict import predict_max_batch_size
from batchfinder.simulator.probe import SimulatedProbe


def search_simulated(probe: SimulatedProbe, shape: Shape, max_batch_size: int | None = None) -> Outcome:
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
