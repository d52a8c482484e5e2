"""One CUDA device: PyTorch's own Python functions run, over a C layer that is made up.

It does what PyTorch's C++ does, as `DeviceCachingAllocator::setMemoryFraction` and its neighbours have it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Of this device 9 and 18 GiB are among the limits whose plain quotient comes to a byte less.
TOTAL = 150_754_820_096


class MadeUpCuda:
    """Writes down what it is asked for.

    Attributes:
        asked: the limits that were set in bytes, `clear` and `synchronize`, in order.
        allowed: the limit that is set; None for none.
        ooms: what `num_ooms` says.
        retries: what `num_alloc_retries` says each time it is asked for; the last stays.
        kernel_error: what the next wait for the device raises.
        is_dead: whether the context refuses everything.
        on_clear: called as the cache is emptied.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.allowed: int | None = None
        self.current = -1
        self.retries: list[int] = [0]
        self.ooms = 0
        self.kernel_error: str | None = None
        self.is_dead = False
        self.on_clear: Callable[[], object] = lambda: None

    def set_fraction(self, fraction: float, device: int) -> None:
        """`setMemoryFraction`."""
        assert device == 0
        assert 0 <= fraction <= 1
        self._check_alive()
        self.allowed = int(fraction * TOTAL) if fraction < 1.0 else None
        self.asked.append(f"limit {self.allowed}")

    def get_fraction(self, device: int) -> float:
        """`getMemoryFraction`."""
        assert device == 0
        return 1.0 if self.allowed is None else self.allowed / TOTAL

    def set_device(self, device: int) -> None:
        """`cudaSetDevice`."""
        self.current = device

    def synchronize(self, device: Any = None) -> None:
        """`cudaDeviceSynchronize`."""
        self.asked.append("synchronize")
        self._check_alive()
        error, self.kernel_error = self.kernel_error, None
        if error is not None:
            raise torch.AcceleratorError(error)

    def _check_alive(self) -> None:
        if self.is_dead:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def clear(self) -> None:
        """`emptyCache`."""
        self.asked.append("clear")
        self.on_clear()

    def stats(self, device: int) -> dict[str, Any]:
        """`getDeviceStats`: 120 bytes are held, 300 were allocated at the peak and 400 reserved."""
        retries = self.retries.pop(0) if len(self.retries) > 1 else self.retries[0]
        return {
            "num_alloc_retries": retries,
            "num_ooms": self.ooms,
            "allocated_bytes": {"all": {"current": 120, "peak": 300}},
            "reserved_bytes": {"all": {"current": 400, "peak": 400}},
        }


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MadeUpCuda:
    """Under `torch.cuda`, for one test."""
    made = MadeUpCuda()
    properties = SimpleNamespace(name="made up", total_memory=TOTAL, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties.name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL, TOTAL))
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", made.stats, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", made.stats)
    for name, function in (
        ("_cuda_setMemoryFraction", made.set_fraction),
        ("_cuda_getMemoryFraction", made.get_fraction),
        ("_cuda_setDevice", made.set_device),
        ("_cuda_emptyCache", made.clear),
        ("_cuda_resetPeakMemoryStats", lambda device: None),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    return made
