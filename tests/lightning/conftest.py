"""What the tests of the callback share: its cache is the test's own, and the nets are importable."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees what another found."""
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def one_quiet_thread() -> Iterator[None]:
    """Small nets are fastest on one thread; Lightning's advice on workers is not asked for."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def quick_collections(nothing_old_is_collected: None) -> None:
    """In all modules of this folder."""
