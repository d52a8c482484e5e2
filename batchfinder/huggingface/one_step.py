"""One optimizer step as `Trainer` takes it, from the micro-batches to the update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from batchfinder.huggingface.batches import TrainerBatches


class OneStep:
    """Takes optimizer steps with a trainer's own `training_step`.

    As in training, all micro-batches of a step are fetched, and moved to the device, before the first of them runs,
    and accelerate's loader has fetched one more: so as many copies are held as a step has micro-batches that are not
    run here.

    Source: `Trainer._run_epoch` in transformers 5.23, `DataLoaderShard.__iter__` in accelerate 1.15.

    Args:
        trainer: about to train.
        batches: what makes the micro-batches.
        target_batch_size: samples per optimizer step.
    """

    def __init__(self, trainer: Any, batches: TrainerBatches, target_batch_size: int) -> None:
        self._trainer = trainer
        self._batches = batches
        self._target_batch_size = target_batch_size

    def __call__(self, micro_batches: Any) -> None:
        """Take one step.

        Args:
            micro_batches: an iterable that has a length.
        """
        trainer = self._trainer
        args, model, count = trainer.args, trainer.model_wrapped, len(micro_batches)
        batches, num_items = trainer.get_batch_samples(iter(micro_batches), count, args.device)
        held = self._not_run(batches)
        trainer.current_gradient_accumulation_steps = len(batches)
        self._call_back("on_step_begin")
        for index, inputs in enumerate(batches):
            last = index == len(batches) - 1
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else trainer.accelerator.no_sync(model=model):
                trainer.training_step(model, inputs, num_items)
            if not last:
                self._call_back("on_substep_end")
        limit = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else float("inf")
        trainer.accelerator.clip_grad_norm_(model.parameters(), limit)
        self._call_back("on_pre_optimizer_step")
        trainer.optimizer.step()
        self._call_back("on_optimizer_step")
        model.zero_grad()
        self._call_back("on_step_end")
        del held

    def _call_back(self, event: str) -> None:
        trainer = self._trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    def _not_run(self, batches: Sequence[Any]) -> list[Any]:
        """Copies in place of the micro-batches that a real step would have fetched as well."""
        window = -(-self._target_batch_size // self._batches.made)
        return [pytree.tree_map_only(torch.Tensor, torch.clone, batches[-1]) for _ in range(window + 1 - len(batches))]
