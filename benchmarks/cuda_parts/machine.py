"""What this was run on, and with: hardware, versions, and pure-Python packages that were carried along."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import Any

from batchfinder.devices import driver_version, host_name
from batchfinder.measure.child_probe import GpuFacts

_VERSIONS = ("torch", "transformers", "pytorch-lightning", "triton", "tenacity", "batchfinder")


def hardware(facts: GpuFacts | None) -> dict[str, Any]:
    """The machine.

    Args:
        facts: of the card; None where there is none.
    """
    gpu = None if facts is None else {key: value for key, value in asdict(facts).items() if key != "versions"}
    return {"cpu": host_name(), "cores": os.cpu_count(), "gpu": gpu, "driver": driver_version()}


def versions(facts: GpuFacts | None) -> dict[str, str]:
    """Of Python and of the packages that take part, and of CUDA.

    Args:
        facts: of the card; None where there is none.
    """
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, **({} if facts is None else facts.versions)}
