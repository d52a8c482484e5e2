"""Ranks that accumulate under DDP: what `test_accumulation_weights.py` starts, through `tests/forks.py`."""

from __future__ import annotations

import os
from typing import Any


def prepare() -> None:
    """Import what a rank does."""
    import torch

    import tests.lightning.test_accumulation_weights  # noqa: F401

    torch.set_num_threads(1)


def respond(request: dict[str, Any]) -> list[Any]:
    """Each rank's optimizer steps: the gradients, the samples they are of, and the weights before and after.

    Args:
        request: `{"rows": [123, 122]}`, how many samples the stream of each rank has; `{"rows": 44}` for so many that a
            sampler deals out to two ranks.
    """
    from tests.forked import at_once

    os.environ.pop("PL_GLOBAL_SEED", None)  # of a fit in the process that asks; samplers would shuffle by it
    rows = request["rows"]
    if isinstance(rows, int):
        return at_once(2, lambda rank: _dealt(rows))
    return at_once(len(rows), lambda rank: _streamed(rows, rank))


def _dealt(rows: int) -> list[Any]:
    from torch.utils.data import DataLoader

    from tests.lightning.test_accumulation_weights import Net, Weighing
    from tests.lightning.tiny import Rows

    return _steps(Net(), Weighing(), DataLoader(Rows(rows), batch_size=4), accumulate_grad_batches=4)


def _streamed(rows: list[int], rank: int) -> list[Any]:
    from torch.utils.data import DataLoader

    from batchfinder.lightning.callback import BatchFinder
    from tests.lightning.test_accumulation_weights import Net
    from tests.lightning.tiny import Stream

    finder = BatchFinder(128 * len(rows), max_batch_size=32, cache=False)
    steps = _steps(Net(), finder, DataLoader(Stream(rows[rank]), batch_size=1))
    assert str(finder.plan) == f"32 x 4 x {len(rows)} devices = {128 * len(rows)}"
    return steps


def _steps(net: Any, callback: Any, loader: Any, **options: Any) -> list[Any]:
    import pytorch_lightning as pl
    import torch

    pl.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy="ddp",
        max_epochs=1 if options else 2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(net, loader)
    weights = [weights for _, _, weights in net.steps] + [net.net.state_dict()]
    listed = [{name: weight.tolist() for name, weight in step.items()} for step in weights]
    return [
        ([gradient.tolist() for gradient in gradients], torch.cat(window).tolist(), before, after)
        for (gradients, window, _), before, after in zip(net.steps, listed[:-1], listed[1:], strict=True)
    ]
