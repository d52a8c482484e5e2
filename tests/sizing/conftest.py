"""The command line beside its functions in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.cli.command import HERE
from tests.cli.conftest import _no_card_here, run

__all__ = ["_no_card_here", "run"]


@pytest.fixture(scope="module")
def _folder_of_the_models() -> Iterator[None]:
    with contextlib.chdir(HERE):
        yield
