"""The GPUs and cloud instances that batchfinder knows, how much of one may be used, and which are in this machine."""

from __future__ import annotations

from batchfinder.devices.catalog import (
    DEFAULT_COMPUTE_CAPABILITY,
    Card,
    Device,
    Gpu,
    Instance,
    all_gpus,
    all_instances,
    device_for,
    device_with_budget,
    find_gpu,
    find_instance,
    smallest_gpus,
)
from batchfinder.devices.detect import PresentGpu, driver_version, host_name, mps_limit_bytes, present_gpus

__all__ = [
    "DEFAULT_COMPUTE_CAPABILITY",
    "Card",
    "Device",
    "Gpu",
    "Instance",
    "PresentGpu",
    "all_gpus",
    "all_instances",
    "device_for",
    "device_with_budget",
    "driver_version",
    "find_gpu",
    "find_instance",
    "host_name",
    "mps_limit_bytes",
    "present_gpus",
    "smallest_gpus",
]
