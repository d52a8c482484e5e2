"""What the tests of Trainers share: their cache is the test's own, and small nets run on one thread."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def alone(own_cache: Path, one_thread: None) -> None:
    """In all modules of this folder."""
