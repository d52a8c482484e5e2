"""Real training on this process's CUDA device, and what PyTorch says of the device.

`tests/measure/test_cuda_probe.py` holds tests marked `gpu`, which need a card; the others run the logic over a C layer
that is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from batchfinder.errors import InvalidValue
from batchfinder.measure.device_memory import CudaMemory, numbered
from batchfinder.measure.trial import StageReadings, run_trial
from batchfinder.results import Measurement, Shape
from batchfinder.training.step import OnStage


class CudaProbe:
    """Takes real steps on a CUDA device in this process.

    Peaks count all that the process holds on the device, as `torch.cuda` does. Whatever the steps change (weights,
    gradients, optimizer state, random numbers) is the caller's to restore.

    Args:
        steps: takes at least two optimizer steps, given batch size, sequence length, `on_stage` and `more`, as
            `Step.run` does.
        device: where they run.
        limit_bytes: bytes the allocator may reserve in all, so that a large card answers for a smaller one; None for
            what the card has.

    Raises:
        InvalidValue: the limit is not positive.
    """

    source = "measured"
    unmodelled: tuple[str, ...] = ()

    def __init__(
        self,
        steps: Callable[[int, int | None, OnStage, Callable[[], bool]], object],
        device: torch.device,
        limit_bytes: int | None = None,
    ) -> None:
        if limit_bytes is not None and limit_bytes <= 0:
            raise InvalidValue("limit_bytes", limit_bytes, "a positive number of bytes")
        self._steps = steps
        self._device = device
        self._memory = CudaMemory(device, limit_bytes)

    def __call__(self, batch_size: int, shape: Shape) -> Measurement:
        """Try one size, from a clean slate.

        Raises:
            Exception: whatever the steps raise that is not about the size, unchanged.
        """
        readings = StageReadings(self._memory.held_bytes, lambda: self._memory.peaks()[0] or 0)
        return run_trial(
            lambda check: self._steps(batch_size, shape.seq_len, readings, check.goes_on),
            self._memory,
            self._device,
            readings=readings,
        )

    def is_dead(self) -> bool:
        """Whether the device's context is dead: then every call fails, with the error that it died of."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return True
        return False


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """What PyTorch says of a device, as JSON values: the fields of a `GpuFacts`.

    It becomes the process's current device, and gets its context, which is no longer free then.
    """
    device = numbered(device)
    torch.cuda.set_device(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    toolkit = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "free_bytes": free_bytes,
        "compute_capability": [properties.major, properties.minor],
        "versions": {"torch": torch.__version__, **{name: found for name, found in toolkit.items() if found}},
    }
