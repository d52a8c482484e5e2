"""Fits that are more than one full batch after another, on PyTorch's CUDA build: the size found trains all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchfinder.testing import CudaStubFixture

pytestmark = pytest.mark.cuda_build


def net(batch_size: int, **parts: Any) -> Any:
    """A module of three wide layers, 17 M weights, whose activations fill a card of 2 GiB at some thousand rows.

    Args:
        parts: `metric` for one of all predictions, `validated` for the rows of a validation batch, `every` for a second
            optimizer that steps every so many batches, `rows` of an epoch, how `wide` layers are.
    """
    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):  # type: ignore[type-arg]
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return self.rows

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(256)

    wide = parts.get("wide", 4096)

    def layers() -> nn.Sequential:
        hidden = [nn.GELU(), nn.Linear(wide, wide), nn.GELU()]
        return nn.Sequential(nn.Linear(256, wide), *hidden, nn.Linear(wide, 256))

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = batch_size
            self.automatic_optimization = "every" not in parts
            self.backbone, self.head = layers(), nn.Linear(256, 10)
            self.other = layers() if "every" in parts else None
            self.kept: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            if self.other is not None:
                for optimizer, part, every in zip(self.optimizers(), (self.backbone, self.other), (1, 5), strict=True):
                    if batch_idx % every == every - 1:
                        optimizer.zero_grad()
                        self.manual_backward(self.head(part(batch)).square().mean())
                        optimizer.step()
                return None
            scores = self.backbone(batch)
            if parts.get("metric"):
                self.kept.append(scores.detach().double())
            return self.head(scores).square().mean()

        def on_train_epoch_end(self) -> None:
            self.kept.clear()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val", self.head(self.backbone(batch)).square().mean())

        def configure_optimizers(self) -> Any:
            if self.other is not None:
                both = [*self.backbone.parameters(), *self.head.parameters()], self.other.parameters()
                return [torch.optim.AdamW(each) for each in both]
            return torch.optim.AdamW(each for each in self.parameters() if each.requires_grad)

        def train_dataloader(self) -> DataLoader[torch.Tensor]:
            return DataLoader(Rows(parts.get("rows", 1_000_000)), self.batch_size)

        def val_dataloader(self) -> Any:
            return DataLoader(Rows(100_000), parts["validated"]) if "validated" in parts else []

    return Net()


def searched_and_trained(
    make_callbacks: Callable[[], list[Any]],
    options: dict[str, Any],
    size: int | None = None,
    checkpoint: str | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """Fit with a finder, or with a `size` and without; save, and go on from, a `checkpoint` where one is named."""
    import os

    import pytorch_lightning as pl
    import torch

    from batchfinder import BatchFinder

    if checkpoint is not None and not os.path.exists(checkpoint):
        first = pl.Trainer(accelerator="gpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False)
        first.fit(net(8, **parts))
        first.save_checkpoint(checkpoint)
        del first
        torch.cuda.empty_cache()
    finder = BatchFinder(cache=False)
    trainer = pl.Trainer(
        **{
            "accelerator": "gpu",
            "devices": 1,
            "limit_train_batches": 8,
            "limit_val_batches": 2,
            "max_epochs": 3,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [*([finder] if size is None else []), *make_callbacks()],
            **options,
        }
    )
    before, reached = 0, 0

    class Retries(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            nonlocal before
            before = torch.cuda.memory_stats()["num_alloc_retries"]

        def on_train_batch_end(self, *arguments: Any) -> None:
            nonlocal reached
            reached += 1

    trainer.callbacks.append(Retries())
    out_of_memory = False
    try:
        trainer.fit(net(size or 8, **parts), ckpt_path=checkpoint)
    except torch.OutOfMemoryError:
        out_of_memory = True
    (found,) = finder.results["fit"].values() if size is None else [None]
    return {
        "size": finder.batch_size if size is None else size,
        "out_of_memory": out_of_memory,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] - before,
        "batches": reached,
        "tries": [] if found is None else [(trial.batch_size, trial.fits) for trial in found.trials],
    }


def found_and_more(
    make_callbacks: Callable[[], list[Any]], options: dict[str, Any], percent: int, **parts: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a search and its training came to, and a training with a size that is so much larger."""
    import gc

    import torch

    found = searched_and_trained(make_callbacks, options, **parts)
    gc.collect()
    torch.cuda.empty_cache()
    return found, searched_and_trained(make_callbacks, options, found["size"] * percent // 100, **parts)


def unfreezes() -> list[Any]:
    """All at epoch 2."""
    from pytorch_lightning.callbacks import BackboneFinetuning

    return [BackboneFinetuning(unfreeze_backbone_at_epoch=2)]


def unfreezes_by_itself() -> list[Any]:
    """A layer at each of three epochs."""
    from pytorch_lightning.callbacks import BaseFinetuning

    class Gradual(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch < 3:
                layer = pl_module.backbone[4 - 2 * epoch]
                self.unfreeze_and_add_param_group(layer, optimizer)

    return [Gradual()]


def accumulates() -> list[Any]:
    """Four micro-batches a step from epoch 1 on."""
    from pytorch_lightning.callbacks import GradientAccumulationScheduler

    return [GradientAccumulationScheduler({0: 1, 1: 4})]


def averages() -> list[Any]:
    """On the device, from the second epoch on."""
    from pytorch_lightning.callbacks import StochasticWeightAveraging

    return [StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, device=None)]


def nothing() -> list[Any]:
    """No callbacks."""
    return []


CASES: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], dict[str, Any]]] = {
    "a sanity check": (nothing, {}, {"validated": 3000}),
    "a validation in the middle": (nothing, {"num_sanity_val_steps": 0, "val_check_interval": 3}, {"validated": 5000}),
    "a larger validation": (nothing, {}, {"validated": 30_000}),
    "16-mixed": (nothing, {"precision": "16-mixed"}, {}),
    "an optimizer every fifth batch": (nothing, {}, {"every": 5}),
    "layers unfrozen at an epoch": (unfreezes, {}, {}),
    "layers unfrozen one by one": (unfreezes_by_itself, {}, {}),
    "accumulation by epoch": (accumulates, {}, {}),
    "an average from an epoch": (averages, {}, {}),
    "a metric that keeps predictions": (
        nothing,
        {"limit_train_batches": 1.0, "max_epochs": 2},
        {"metric": True, "rows": 150_000},
    ),
}


FAILURES = {"an optimizer every fifth batch": 4, "a metric that keeps predictions": 2}
"""Sizes that may fail in the search where a step says less of the schedule; elsewhere one."""


IN_CI = ("one by one",)
"""Parts of the names of the cases that CI has time for."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if any(part in case for part in IN_CI) else pytest.mark.exhaustive) for case in CASES],
)
def test_the_size_found_trains(cuda_stub: CudaStubFixture, case: str) -> None:
    """Every batch, with no out of memory and no cache given back; some more do not."""
    make_callbacks, options, parts = CASES[case]
    card = cuda_stub(gpu="A100", memory="2GiB")
    found, more = card.run(found_and_more, make_callbacks, options, 115 if "metric" in parts else 105, **parts).result
    assert not found["out_of_memory"], found
    assert not found["retries"], found
    assert sum(not fits for _, fits in found["tries"]) <= FAILURES.get(case, 1), found
    assert more["out_of_memory"] or more["retries"], (found, more)


def test_a_fit_that_goes_on_from_a_checkpoint(cuda_stub: CudaStubFixture, tmp_path: Any) -> None:
    """The optimizer's states are there before the first batch."""
    card = cuda_stub(gpu="A100", memory="2GiB")
    checkpoint = str(tmp_path / "first.ckpt")
    found = card.run(searched_and_trained, nothing, {}, None, checkpoint, wide=8192).result
    assert not found["out_of_memory"], found
    assert not found["retries"], found


def times_emptied(validations: int) -> list[int]:
    """How often the cache has been emptied from a training's start on, as each of its epochs starts."""
    from unittest.mock import patch

    import pytorch_lightning as pl
    import torch

    seen: list[int] = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            emptied.reset_mock()

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(emptied.call_count)

    with patch.object(torch.cuda, "empty_cache", wraps=torch.cuda.empty_cache) as emptied:
        options = {"limit_train_batches": 1.0, "limit_val_batches": validations}
        searched_and_trained(lambda: [Watch()], options, rows=30_000, validated=1000)
    return seen


def test_the_cache_is_kept_where_no_validation_comes_between_epochs(cuda_stub: CudaStubFixture) -> None:
    """What the optimizer's state shares segments with could not be given back: a full batch would reserve more."""
    card = cuda_stub(gpu="A100", memory="2GiB")
    assert card.run(times_emptied, 0).result == [0, 0, 0]
    assert card.run(times_emptied, 2).result == [1, 4, 7]
