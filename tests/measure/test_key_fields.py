"""The fields of a cache key that all measured results share."""

from __future__ import annotations

import pytest
import torch

from batchfinder.measure.device_memory import memory_of
from batchfinder.measure.key_fields import measured_key_fields
from batchfinder.measure.tuner import SearchLimits
from batchfinder.results import Shape

CPU = torch.device("cpu")


def test_the_fields_that_all_measured_results_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's memory and the search's limits; the budget is what was usable; a headroom only where it is bytes."""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    memory = memory_of(CPU, 3 << 30)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([weight]), torch.optim.Adagrad([weight])]
    limits = SearchLimits(64, 0.02, 5 << 20, 5 << 20, min_batch_size=2, multiple_of=4, target_batch_size=32)
    found = measured_key_fields(memory, limits, CPU, Shape(128), optimizers)
    allocator = found.pop("allocator")
    assert found == {
        "gpu": memory.name,
        "total_bytes": memory.total_bytes,
        "usable_bytes": memory.allowance_bytes,
        "seq_len": 128,
        "optimizer": "SGD + Adagrad",
        "max_batch_size": 32,
        "floor": 2,
        "multiple_of": 4,
        "tolerance": 0.02,
        "headroom_bytes": 5 << 20,
        "source": "measured",
    }
    assert found["usable_bytes"] <= 3 << 30
    assert allocator["MALLOC_ARENA_MAX"] == "1"
    # A share is of what is free just then, which is another number at each start.
    limits = SearchLimits(64, 0.02, 5 << 20, 0.05)
    assert measured_key_fields(memory, limits, CPU, Shape(), [])["headroom_bytes"] == 0
