"""Some of the random fits of benchmarks/random_fits.py: the size that the callback finds trains two epochs and more."""

from __future__ import annotations

import pytest

from batchfinder.testing import CudaStubFixture
from benchmarks.random_fit.draw import draw
from benchmarks.random_fit.run import results_of

pytestmark = pytest.mark.cuda_build

SEEDS = (204, 209, 211)


def test_sizes_found_train(cuda_stub: CudaStubFixture) -> None:
    """No out of memory, and no cache given back; of each, few sizes are tried."""
    for row in cuda_stub().run(results_of, SEEDS, largest=False).result:
        assert "failed" not in row, row
        assert row["trains"], row
        assert row["epochs"] >= 2, row
        assert row["size"] < draw(row["seed"]).samples, row
        assert sum(size < 0 for size in row["tries"]) <= 3, row
