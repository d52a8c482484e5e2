"""The device a simulation runs on: a card of the catalogue, a budget, or a budget on a card."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.devices.budget import Budget
from batchfinder.devices.gpu import Gpu

DEFAULT_COMPUTE_CAPABILITY = (8, 0)
"""Stands in where no NVIDIA GPU was named: a budget alone, or an AMD card. It is an A100's, the usual case."""


@dataclass(frozen=True, slots=True)
class Device:
    """All that a simulation needs to know of a device.

    Attributes:
        name: for reports and messages.
        total_bytes: what an out-of-memory message calls the total capacity.
        usable_bytes: what the caching allocator can reserve.
        compute_capability: decides which kernels the recorded step would run.
        assumed_capability: whether that is the default, as no NVIDIA GPU was named.
        context_bytes: what the CUDA context and libraries take beside what is usable; 0 where no card was named.
    """

    name: str
    total_bytes: int
    usable_bytes: int
    compute_capability: tuple[int, int]
    assumed_capability: bool = False
    context_bytes: int = 0


def device_for(gpu: Gpu) -> Device:
    """A whole card with nothing else on it.

    Args:
        gpu: a GPU of the catalogue.
    """
    capability = gpu.compute_capability
    return Device(
        gpu.name,
        gpu.memory_bytes,
        gpu.usable_bytes,
        capability or DEFAULT_COMPUTE_CAPABILITY,
        assumed_capability=capability is None,
        context_bytes=gpu.context_bytes,
    )


def device_with_budget(budget_bytes: int, gpu: Gpu | None = None) -> Device:
    """A device of which the allocator may take a budget, as under `torch.cuda.set_per_process_memory_fraction`.

    The budget is the allocator's in full: the CUDA context is outside it. On a named card the context still has to fit
    beside it, so no more than the card's own usable bytes are given out.

    Args:
        budget_bytes: the most the allocator may reserve.
        gpu: the card it is a part of; None for no card in particular.

    Raises:
        InvalidValue: the budget is not positive.
    """
    budget = Budget(budget_bytes)
    if gpu is None:
        return Device(str(budget), budget_bytes, budget_bytes, DEFAULT_COMPUTE_CAPABILITY, assumed_capability=True)
    card = device_for(gpu)
    return Device(
        name=f"{gpu.name}, {budget}",
        total_bytes=budget.of(card.total_bytes),
        usable_bytes=budget.of(card.usable_bytes),
        compute_capability=card.compute_capability,
        assumed_capability=card.assumed_capability,
        context_bytes=card.context_bytes,
    )
