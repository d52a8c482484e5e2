"""A GradScaler whose first steps overflow: tries skip one step, as training will, and make the optimizer's state."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from batchfinder.lightning.callback import BatchFinder
from tests.lightning import nets


class Overflowing(nets.Transformer):
    """Gradients that are infinite in half precision at the usual scale of 65536, and finite at 1."""

    def loss(self, batch: Any) -> torch.Tensor:
        return 1000 * super().loss(batch)


class StateAtEachBatch(pl.Callback):
    """Notes, as each batch starts, whether the optimizer has its state; in a list that no try puts back."""

    seen: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        StateAtEachBatch.seen.append(bool(trainer.optimizers[0].state))


@pytest.mark.parametrize("started", [False, True])
def test_a_try_skips_its_first_step_alone(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each try the third step starts with Adam's state; the scaler then is as it was, and training's own skips.

    Whether the scaler has a scale already or not.
    """
    monkeypatch.setattr(StateAtEachBatch, "seen", [])
    scaler = torch.amp.GradScaler("cpu")
    if started:
        scaler.scale(torch.ones(1))
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    finder = BatchFinder(max_batch_size=4, cache=False, probe_callbacks=[StateAtEachBatch])
    trainer = nets.trainer(callbacks=[finder, StateAtEachBatch()], plugins=[plugin], max_epochs=-1, max_steps=2)
    trainer.fit(Overflowing())
    *tried, first, second = StateAtEachBatch.seen
    assert tried == [False, False, True] * (len(tried) // 3)
    assert len(tried) >= 3
    assert (first, second) == (False, False)  # training at the usual scale does skip its first step
    assert scaler._init_scale == 65536.0
