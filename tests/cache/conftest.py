from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchfinder.cache import CacheKey

FIELDS: dict[str, Any] = {
    "model": "bert-base:3f2a",
    "gpu": "Titan X",
    "total_bytes": 12_800_000_000,
    "usable_bytes": 12_300_000_000,
    "seq_len": 128,
    "mode": "train",
    "precision": "32",
    "optimizer": "adamw",
    "optimizer_options": {"lr": 5e-5, "betas": (0.9, 0.999), "foreach": True, "weight_decay": 0},
    "attention": "eager",
    "gradient_checkpointing": False,
    "accumulation": 1,
    "allocator": {"expandable_segments": False},
    "max_batch_size": None,
    "floor": 1,
    "multiple_of": 1,
    "tolerance": 0.0,
    "headroom_bytes": 0,
    "source": "simulated",
    "versions": {"batchfinder": "0.1.0", "torch": "2.13.0"},
    "extra": {},
}


@pytest.fixture(scope="session")
def fields() -> dict[str, Any]:
    """Every field of a usual key."""
    return dict(FIELDS)


@pytest.fixture(scope="session")
def make_key() -> Callable[..., CacheKey]:
    """Make a usual key, with changes."""
    return lambda **changes: CacheKey(**{**FIELDS, **changes})
