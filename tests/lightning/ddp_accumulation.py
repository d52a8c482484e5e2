"""Two ranks that accumulate under DDP: what `test_accumulation_weights.py` starts, through `tests/forks.py`."""

from __future__ import annotations

import os
from typing import Any


def prepare() -> None:
    """Import what a rank does."""
    import torch

    import tests.lightning.test_accumulation_weights  # noqa: F401

    torch.set_num_threads(1)


def respond(request: dict[str, Any]) -> list[Any]:
    """Each rank's optimizer steps: the gradients, the samples they are of, and the weights they were taken at."""
    from tests.forked import at_once

    os.environ.pop("PL_GLOBAL_SEED", None)  # of a fit in the process that asks; samplers would shuffle by it
    return at_once(2, lambda rank: _steps())


def _steps() -> list[Any]:
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader

    from tests.lightning.test_accumulation_weights import Net, Weighing
    from tests.lightning.tiny import Rows

    net = Net()
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=4,
        callbacks=[Weighing()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(net, DataLoader(Rows(44), batch_size=4))
    return [
        (
            [gradient.tolist() for gradient in gradients],
            torch.cat(window).tolist(),
            {name: weight.tolist() for name, weight in weights.items()},
        )
        for gradients, window, weights in net.steps
    ]
