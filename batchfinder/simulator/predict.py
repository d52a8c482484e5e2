"""A first guess of the largest batch, from two replays on a card without end."""

from __future__ import annotations

from batchfinder.outcome import Shape
from batchfinder.simulator.allocator import UNLIMITED
from batchfinder.simulator.probe import SimulatedProbe

# A batch of one needs a recording of its own, so neither size is 1.
_SMALL, _LARGE = 2, 32


def predict_max_batch_size(probe: SimulatedProbe, shape: Shape) -> int:
    """Where a line through the peaks of two sizes crosses the card's capacity. It is a guess to start a search from.

    Args:
        probe: knows the card and the step.
        shape: one sample's shape.

    Returns:
        A size of at least 2.
    """
    low, high = (probe.timeline(size, shape, UNLIMITED).max_allocated_bytes for size in (_SMALL, _LARGE))
    per_sample = (high - low) / (_LARGE - _SMALL)
    if per_sample <= 0:
        return _LARGE
    return max(_SMALL, int(_SMALL + (probe.memory.capacity_bytes - low) / per_sample))
