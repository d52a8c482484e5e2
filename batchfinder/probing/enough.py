"""As many steps as show the peak, and no more."""

from __future__ import annotations

from dataclasses import replace

from batchfinder.step.step import StepSettings

STEPS = 2
"""Adam's state appears in the first step, so the peak comes in the second."""

MICRO_BATCHES = 2
"""The second micro-batch of a step runs with the gradients of the first alive; a third adds nothing."""


def enough(settings: StepSettings) -> StepSettings:
    """The settings to probe with: at least two optimizer steps, and two micro-batches where there are any more.

    Args:
        settings: how the training run takes its steps.
    """
    return replace(settings, steps=max(STEPS, settings.steps), micro_batches=min(MICRO_BATCHES, settings.micro_batches))
