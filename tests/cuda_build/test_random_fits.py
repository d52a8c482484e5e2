"""Some of the random fits of benchmarks/random_fits.py: the size that the callback finds trains two epochs and more."""

from __future__ import annotations

import pytest

from batchfinder.testing import CudaStubFixture
from benchmarks.random_fit.draw import draw
from benchmarks.random_fit.run import results_of

pytestmark = pytest.mark.cuda_build

IN_CI = (20, 37, 46, 63, 71, 125, 209, 240, 246, 294)
"""Some that take seconds, and one that had its cache given back by rare orders of its lengths."""
BY_HAND = (21, 26, 30, 34, 67, 85, 116, 142, 150, 174, 193, 204, 211, 218)
SEEDS = [*IN_CI, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in BY_HAND)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_size_found_trains(cuda_stub: CudaStubFixture, seed: int) -> None:
    """No out of memory, and no cache given back; few sizes are tried."""
    (row,) = cuda_stub().run(results_of, [seed], largest=False).result
    assert "failed" not in row, row
    assert row["trains"], row
    assert row["epochs"] >= 2, row
    assert row["size"] < draw(seed).samples, row
    assert sum(size < 0 for size in row["tries"]) <= 3, row


def found_with_its_segments() -> tuple[int, bool, int]:
    """Of a fit whose samples differ in length: the size, whether segments are expandable after it, and retries in it."""
    import os
    import warnings

    import pytorch_lightning as pl
    import torch

    from batchfinder import BatchFinder
    from benchmarks.peer.work import WithoutValidation, case
    from benchmarks.random_fit.parts import trainer

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.before = torch.cuda.memory_stats()["num_alloc_retries"]

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: object) -> None:
            self.retries = torch.cuda.memory_stats()["num_alloc_retries"] - self.before

    warnings.filterwarnings("error", ".*_set_allocator_settings")
    watch, finder = Watch(), BatchFinder(cache=False)
    fit = case("lstm", 512, 2, 128, "free", "RTX 4090", samples=6000, memory_bytes=4 << 30)
    trainer(fit, [finder, watch], max_steps=30).fit(WithoutValidation(fit, 2))
    expandable = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    assert ("expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")) is (True in expandable)
    assert finder.batch_size is not None
    return finder.batch_size, True in expandable, watch.retries


def test_where_lengths_differ_segments_are_expandable(cuda_stub: CudaStubFixture) -> None:
    """So that larger batches fit; but for a user who has configured the allocator."""
    size, expandable, retries = (
        cuda_stub(gpu="RTX 4090", memory="4GiB", values=False).run(found_with_its_segments).result
    )
    assert (expandable, retries) == (True, 0)
    configured = (
        cuda_stub(gpu="RTX 4090", memory="4GiB", values=False, allocator="expandable_segments:False")
        .run(found_with_its_segments)
        .result
    )
    assert configured[1] is False
    assert size > configured[0]


def sizes_tried(seed: int) -> list[int]:
    """The sizes that the callback tries in the fit of a seed, which takes one step."""
    from batchfinder import BatchFinder
    from benchmarks.random_fit.parts import Module, trainer

    fit, finder = draw(seed), BatchFinder(cache=False)
    trainer(fit, [finder], max_steps=1, limit_val_batches=0).fit(Module(fit, 2))
    (found,) = finder.results["fit"].values()
    return [trial.batch_size for trial in found.trials]


@pytest.mark.exhaustive
def test_weights_of_4_bits_are_predicted(cuda_stub: CudaStubFixture) -> None:
    """The first size tried is a simulated step's answer, and not the smallest."""
    fit = draw(395)
    assert fit.adapter == "qlora"
    tried = cuda_stub(gpu=fit.card, memory=str(fit.memory_bytes)).run(sizes_tried, fit.seed).result
    assert tried[0] > max(tried) / 2
