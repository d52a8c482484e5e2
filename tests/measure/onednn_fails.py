"""Trials whose limit is met where oneDNN compiles: what a test of `run_trial` starts, through `tests/forks.py`."""

from __future__ import annotations

import resource
import warnings
from typing import Any

import torch
from torch import nn

from batchfinder.measure.device_memory import HostMemory
from batchfinder.measure.host_limits import status
from batchfinder.measure.trial import run_trial

SIZES = (24, 25)
_CPU = torch.device("cpu")
_net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def prepare() -> None:
    """Import what a step takes."""
    torch.set_num_threads(1)
    _net(torch.zeros(2, 3, 80, 80))


def _trial(size: int) -> dict[str, Any]:
    def step(check: Any) -> None:
        _net(torch.ones(size, 3, 80, 80)).sum().backward()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        measurement = run_trial(step, HostMemory(None), _CPU)
    return {"message": measurement.message, "fits": measurement.fits, "warned": [str(each.message) for each in warned]}


def respond(request: dict[str, Any]) -> dict[str, Any]:
    """Try a size under a limit of the address space, then another size without it.

    Args:
        request: `room_bytes`, that the process may grow by; None for what a step takes, which is returned.
    """
    before, room = status("VmSize") or 0, request["room_bytes"]
    if room is None:
        _trial(SIZES[0])
        return {"room_bytes": (status("VmPeak") or 0) - before}
    resource.setrlimit(resource.RLIMIT_AS, (before + room, resource.RLIM_INFINITY))
    limited = _trial(SIZES[0])
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"limited": limited, "then": _trial(SIZES[1]), "onednn": torch.backends.mkldnn.enabled}
