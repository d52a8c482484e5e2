"""What the tests of the callback share: its cache is the test's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def alone_and_quiet(own_cache: Path, one_thread: None) -> Iterator[None]:
    """In all modules of this folder; Lightning's advice on workers is not asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
