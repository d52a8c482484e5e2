"""Reading the stages of a step that somebody else wrote: where its first backward begins, where a step has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchfinder.probing.memory import Memory
from batchfinder.probing.readings import Readings


@contextmanager
def listening(memory: Memory) -> Iterator[Readings]:
    """Read what stays between steps and what the first forward takes, while a user's own steps run.

    The forward has ended where `torch.autograd.backward` is called, which `Tensor.backward` does as well; a step that
    calls `torch.autograd.grad` alone is not read. No hooks on modules: a compiled one would be compiled again for them.

    Args:
        memory: the device's memory. Where it does not count what is allocated, nothing is read.

    Yields:
        What was read; None in each place where nothing was.
    """
    readings = Readings(memory.held_bytes, lambda: memory.peaks()[0] or 0)
    if memory.peaks()[0] is None:
        yield readings
        return
    readings(0, "batch", 0)
    backward, first = torch.autograd.backward, True

    def read_and_go_on(*arguments: Any, **options: Any) -> None:
        nonlocal first
        if first:
            first = False
            readings(0, "backward", 0)
        backward(*arguments, **options)

    def stepped(optimizer: Any, arguments: Any, options: Any) -> None:
        # Gradients are alive here, as they are at the peak of the steps to come.
        readings(1, "batch", 0)

    hook = register_optimizer_step_post_hook(stepped)
    torch.autograd.backward = read_and_go_on
    try:
        yield readings
    finally:
        torch.autograd.backward = backward
        hook.remove()
