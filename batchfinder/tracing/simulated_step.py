"""A simulated step that behaves like a real one: it returns, or raises what CUDA raises."""

from __future__ import annotations

import torch

from batchfinder.outcome import Measurement, Shape
from batchfinder.simulator.probe import SimulatedProbe


def simulated_step(probe: SimulatedProbe, batch_size: int, shape: Shape) -> Measurement:
    """Take a step on the simulated card, for code that expects a genuine out-of-memory error.

    Args:
        probe: knows the card and the step.
        batch_size: samples in a micro-batch.
        shape: one sample's shape.

    Returns:
        What was seen, when the size fits.

    Raises:
        torch.OutOfMemoryError: it does not; the text is PyTorch's own, with the word "simulated".
    """
    measurement = probe(batch_size, shape)
    if not measurement.fits:
        raise torch.OutOfMemoryError(measurement.message)
    return measurement
