"""What the tests of Trainers share: their cache is the test's own, and small nets run on one thread."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees what another found."""
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small nets are fastest on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """What is there already is not looked through in each garbage collection, of which a training alone has three."""
    gc.freeze()
    yield
    gc.unfreeze()
