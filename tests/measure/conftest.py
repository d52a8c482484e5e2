"""Worker processes that are forks of one, which has imported torch once for them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchfinder.measure.child_probe import MALLOC, WORKER
from tests.forks import ROOT
from tests.prefork import Prefork

IMPORTED = ("batchfinder.measure.worker", "torch._dynamo", "torch.profiler")


@pytest.fixture(scope="session")
def worker_prefork() -> Iterator[Prefork]:
    """The process that is forked; started when it is first needed."""
    with Prefork(WORKER, IMPORTED, {**MALLOC, "PYTHONPATH": str(ROOT)}) as started:
        yield started


@pytest.fixture(scope="module")
def forked_workers(worker_prefork: Prefork) -> Iterator[None]:
    """Workers are forks in this module: `pytestmark = pytest.mark.usefixtures("forked_workers")`."""
    with worker_prefork.patched():
        yield
