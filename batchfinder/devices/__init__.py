"""The GPUs and cloud instances that batchfinder knows, how much of one may be used, and which are in this machine."""

from __future__ import annotations

from batchfinder.devices.catalog import Gpu, Instance, all_gpus, all_instances, find_gpu, find_instance
from batchfinder.devices.detect import PresentGpu, driver_version, host_name, present_gpus
from batchfinder.devices.device import DEFAULT_COMPUTE_CAPABILITY, Card, Device, device_for, device_with_budget

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
    "present_gpus",
]
