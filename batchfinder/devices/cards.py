"""Cards by the names, budgets and cloud instances that are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from batchfinder.devices.catalog import (
    DEFAULT_COMPUTE_CAPABILITY,
    Card,
    Device,
    all_gpus,
    device_for,
    device_with_budget,
    find_gpu,
    find_instance,
)
from batchfinder.devices.detect import PresentGpu, mps_limit_bytes
from batchfinder.errors import InvalidValue, UnknownName
from batchfinder.units import format_bytes, parse_budget, parse_bytes

USUAL_GPU = "A100 80GB"
"""Where a function in Python is given no name."""
_UNKNOWN_CONTEXT_BYTES = 600 << 20
"""What the CUDA context of a GPU that is not in the catalogue is taken to need."""
_AT_LEAST = re.compile(r"(\d{1,6})\s*(?:gib|gb|g)?\+", re.IGNORECASE)


def card(gpu: str | None, budget: str | None = None, count: int = 1, context: str | None = None) -> Card:
    """A GPU by name, a budget alone, or a budget on a GPU; `context` is what the CUDA context takes of a named one.

    Raises:
        UnknownName: no such GPU.
        InvalidValue: the budget or the context is not a size, the context leaves nothing, or there is no GPU for it.
    """
    found = None if gpu is None else find_gpu(gpu, "--budget")
    context_bytes = None if context is None else parse_bytes(context, "context")
    if context_bytes is not None and (found is None or context_bytes >= found.memory_bytes):
        named = "a --gpu or an --instance with it, of whose memory it is taken"
        expected = named if found is None else f"less than the {format_bytes(found.memory_bytes)} of {found.name}"
        raise InvalidValue("context", context, expected)
    if budget is not None:
        device = device_with_budget(parse_budget(budget, "budget"), found, context_bytes)
    elif found is not None:
        device = device_for(found, context_bytes)
    else:
        raise InvalidValue("gpu", None, "a GPU's name or a --budget")
    return Card(device, device.name, count)


def card_here(gpu: PresentGpu, count: int = 1, context: str | None = None) -> Card:
    """A GPU of this machine, whole, as it is simulated: by what the catalogue has of it, or the driver says.

    Raises:
        InvalidValue: MPS's limit or the context is not a size, or the context leaves nothing.
    """
    limit = mps_limit_bytes(gpu.index)
    try:
        return card(gpu.name, None if limit is None else str(limit), count, context)
    except UnknownName:
        capability = gpu.compute_capability or DEFAULT_COMPUTE_CAPABILITY
        # nvidia-smi counts what the driver keeps: up to 3 % more than CUDA's total.
        total = int(0.97 * gpu.smi_total_bytes)
        usable = max(0, total - _UNKNOWN_CONTEXT_BYTES)
        return Card(Device(gpu.name, total, usable, capability, gpu.compute_capability is None), gpu.name, count)


def instance_card(name: str, budget: str | None = None, count: int | None = None, context: str | None = None) -> Card:
    """The GPUs of a cloud instance, all of them or `count`.

    Raises:
        InvalidValue: the instance has fewer, or the budget or the context is not a size.
        UnknownName: no such instance.
    """
    instance = find_instance(name)
    if count is not None and count > instance.num_gpus:
        raise InvalidValue("gpus", count, f"at most {instance.num_gpus}, the GPUs of {instance.name}")
    one = card(instance.gpu.name, budget, count or instance.num_gpus, context)
    return replace(one, name=f"{instance.name}: {one.count} x {one.name}")


def named_gpus(values: Iterable[str]) -> list[str]:
    """The GPUs that are named: `t4,v100`, `all`, or `24GB+` for all of at least that size.

    Raises:
        InvalidValue: no GPU of the catalogue is as large.
    """
    named: list[str] = []
    for value in (part.strip() for each in values for part in each.split(",")):
        if value.lower() == "all":
            named += [gpu.name for gpu in all_gpus()]
        elif found := _AT_LEAST.fullmatch(value):
            large = [gpu.name for gpu in all_gpus() if gpu.class_gb >= int(found[1])]
            if not large:
                largest = max(gpu.class_gb for gpu in all_gpus())
                raise InvalidValue("gpu", value, f"at most {largest}GB+: no GPU of the catalogue is as large")
            named += large
        else:
            named.append(value)
    return named
