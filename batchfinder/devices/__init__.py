"""The GPUs and cloud instances that batchfinder knows, how much of one may be used and costs, and which are here."""

from __future__ import annotations

from batchfinder.devices.catalog import (
    DEFAULT_COMPUTE_CAPABILITY,
    Card,
    Device,
    Gpu,
    Instance,
    Multiprocessors,
    Price,
    all_gpus,
    all_instances,
    device_for,
    device_with_budget,
    find_gpu,
    find_instance,
    resident_threads,
    smallest_gpus,
    typical_gpu,
    without_bf16,
)
from batchfinder.devices.detect import (
    PresentGpu,
    driver_is_here,
    driver_version,
    host_name,
    mps_limit_bytes,
    present_gpus,
)
from batchfinder.devices.prices import known_prices, parse_prices

__all__ = [
    "DEFAULT_COMPUTE_CAPABILITY",
    "Card",
    "Device",
    "Gpu",
    "Instance",
    "Multiprocessors",
    "PresentGpu",
    "Price",
    "all_gpus",
    "all_instances",
    "device_for",
    "device_with_budget",
    "driver_is_here",
    "driver_version",
    "find_gpu",
    "find_instance",
    "host_name",
    "known_prices",
    "mps_limit_bytes",
    "parse_prices",
    "present_gpus",
    "resident_threads",
    "smallest_gpus",
    "typical_gpu",
    "without_bf16",
]
