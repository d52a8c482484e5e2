"""What a key says of real steps: as it was asked for, and the same whoever takes them."""

from __future__ import annotations

import pytest
import torch

from batchfinder.measure.device_memory import memory_of
from batchfinder.measure.key_fields import measured_in
from batchfinder.measure.tuner import SearchLimits
from batchfinder.results import Shape

CPU = torch.device("cpu")


def test_the_fields_that_all_real_steps_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's memory and the search's bounds; the budget is what was usable; bytes to keep free only as bytes."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    memory = memory_of(CPU, 3 << 30)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([weight]), torch.optim.Adagrad([weight])]
    found = measured_in(memory, SearchLimits(64, 0.02, 5 << 20, 5 << 20), CPU, Shape(128), optimizers)
    allocator = found.pop("allocator")
    assert found == {
        "gpu": memory.name,
        "total_bytes": memory.total_bytes,
        "usable_bytes": memory.allowance_bytes,
        "seq_len": 128,
        "optimizer": "SGD + Adagrad",
        "max_batch_size": 64,
        "tolerance": 0.02,
        "headroom_bytes": 5 << 20,
        "source": "measured",
    }
    assert found["usable_bytes"] <= 3 << 30
    assert allocator["MALLOC_ARENA_MAX"] == "1"
    # A share is of what is free just then, which is another number at each start.
    assert measured_in(memory, SearchLimits(64, 0.02, 5 << 20, 0.05), CPU, Shape(), [])["headroom_bytes"] == 0
