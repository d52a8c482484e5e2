"""WHERE: the GPUs and cloud instances batchfinder knows, how much of one may be used, and which are present."""

from __future__ import annotations

from batchfinder.devices.budget import Budget
from batchfinder.devices.device import DEFAULT_COMPUTE_CAPABILITY, Device, device_for, device_with_budget
from batchfinder.devices.gpu import Gpu, all_gpus, find_gpu
from batchfinder.devices.host import host_name
from batchfinder.devices.instance import Instance, all_instances, find_instance
from batchfinder.devices.present import PresentGpu, driver_version, parse_nvidia_smi, present_gpus

__all__ = [
    "DEFAULT_COMPUTE_CAPABILITY",
    "Budget",
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
    "parse_nvidia_smi",
    "present_gpus",
]
