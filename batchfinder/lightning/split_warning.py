"""Saying, before training, that splitting a batch changes what is trained: batch norms, and losses over pairs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from batchfinder.errors import BatchFinderError
from batchfinder.lightning.batch_start import BatchStart
from batchfinder.lightning.batches import ProbeBatches
from batchfinder.lightning.length_table import LengthTable
from batchfinder.lightning.ranks import without_the_others
from batchfinder.lightning.trainer_state import capture_data
from batchfinder.splitting.separable import SAMPLES, check_separable, not_separable
from batchfinder.splitting.weights import Weight

_NAMED = 3

log = logging.getLogger(__name__)


def warn_if_inexact(trainer: Any, finder: Any, batches: ProbeBatches, table: LengthTable, weight: Weight) -> None:
    """Warn once of all that makes the split batch's gradient another one than the whole batch's.

    The loss is looked at with a few samples, in eval mode and without gradients; all of that is put back.

    Args:
        trainer: set up, its loop not started.
        finder: the callback that asks.
        batches: where batches come from.
        table: the largest micro-batch of each length.
        weight: what the loss is said to be a mean over.

    Raises:
        NotSplittable: the batches cannot be taken apart, or the weight cannot be had from them.
        InvalidValue: the user's weight returned what cannot be meant.
    """
    found = []
    names = not_separable(trainer.lightning_module)
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        found.append(
            f"{', '.join(names[:_NAMED])}{more} look at all samples of a micro-batch together, which are fewer than "
            "the batch's; a GroupNorm or LayerNorm would not"
        )
    differs = _loss_differs(trainer, finder, batches, table, weight)
    if differs is not None:
        found.append(differs)
    if found:
        rank_zero_warn(f"BatchFinder splits batches, which changes what is trained: {'. Also: '.join(found)}.")


def _loss_differs(trainer: Any, finder: Any, batches: ProbeBatches, table: LengthTable, weight: Weight) -> str | None:
    """What is wrong with the weight or the loss, in words; None if nothing, or if nobody can tell."""
    module = trainer.lightning_module
    samples = min(SAMPLES, *table.sizes.values())
    if samples < 2:
        return None
    untouched, start = capture_data(trainer, finder), BatchStart(module)
    try:
        batch = module._on_before_batch_transfer(batches.mixed(samples), dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch)
        module.eval()
        module.log = module.log_dict = lambda *args, **kwargs: None

        def loss_of(batch: Any) -> Tensor:
            kwargs = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
            with trainer.precision_plugin.train_step_context():
                seen = module.training_step(*kwargs.values())
            loss = seen.get("loss") if isinstance(seen, Mapping) else seen
            return torch.tensor(float("nan")) if loss is None else loss

        with without_the_others(trainer):
            return check_separable(loss_of, batch, weight)
    except BatchFinderError:
        raise
    except Exception as error:  # of a step that cannot run in eval mode, say; training will show what is wrong with it
        log.info("BatchFinder: whether the loss may be split was not checked: %s: %s", type(error).__name__, error)
        return None
    finally:
        start.restore()
        untouched.restore()
