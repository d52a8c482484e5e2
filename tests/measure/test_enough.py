from __future__ import annotations

import pytest

from batchfinder.measure.worker import enough
from batchfinder.training.step import StepSettings


@pytest.mark.parametrize(
    ("asked", "taken"), [((1, 1), (2, 1)), ((2, 2), (2, 2)), ((1, 64), (2, 2)), ((5, 1), (5, 1)), ((3, 3), (3, 2))]
)
def test_as_many_steps_as_show_the_peak(asked, taken):
    """At least two optimizer steps; two micro-batches where there are more than one, and never more."""
    settings = enough(StepSettings(steps=asked[0], micro_batches=asked[1], optimizer="sgd"))
    assert (settings.steps, settings.micro_batches, settings.optimizer) == (*taken, "sgd")
