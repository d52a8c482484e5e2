"""A run that goes on from a checkpoint goes on as it would have without the callback."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint

from tests.lightning import nets
from tests.lightning.identical_runs import assert_identical, two_runs


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("in_the_middle", [False, True], ids=["after an epoch", "within an epoch"])
def test_a_resumed_run_is_bit_identical(scheduled: bool, in_the_middle: bool, tmp_path: Path) -> None:
    """Weights, optimizer, scheduler and loops are the checkpoint's, accumulation and mixed precision included."""

    def make(size: int) -> nets.ConvNet:
        return nets.ConvNet(size, rows=64, side=6, width=4, scheduled=scheduled)

    pl.seed_everything(3, verbose=False)
    nets.trainer(
        callbacks=[ModelCheckpoint(tmp_path, filename="it", every_n_train_steps=3 if in_the_middle else 4)],
        enable_checkpointing=True,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        max_epochs=3,
        max_steps=5 if scheduled else 4,
    ).fit(make(8))
    found, direct = two_runs(
        make,
        target=16,
        feed=lambda size: {"ckpt_path": tmp_path / "it.ckpt"},
        precision="bf16-mixed",
        max_epochs=3,
        max_steps=5 if scheduled else -1,
    )
    assert_identical(found, direct)
    already = 3 if in_the_middle else 4
    assert len(found.module.losses) == 2 * (found.trainer.global_step - already) > 0
