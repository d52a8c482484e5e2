"""The right weight for each micro-batch of an optimizer step, where Lightning's is wrong.

Lightning divides every loss by k = `accumulate_grad_batches`. With micro-batches of n1 ... nr samples in a window (all
that is accumulated for one step) it steps with the gradient (g1 + ... + gr) / k, where gi is the gradient of the mean
over micro-batch i. That of the mean over all the window's samples is (n1 g1 + ... + nr gr) / (n1 + ... + nr). The two
agree in a full window of equal micro-batches, and differ in an epoch's last one, which may be shorter (r < k) and may
end in a smaller micro-batch.

So micro-batch i's loss is weighted by ni / n1 as it enters the backward, and the accumulated gradients by
k n1 / (n1 + ... + nr) before they are clipped. Both are exactly 1 wherever Lightning is right, and are then left
out, so that nothing changes by so much as a bit.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from batchfinder.accumulation import AccumulationPlan
from batchfinder.lightning.accumulate import check_epoch_fills_a_step
from batchfinder.lightning.loaders import samples_in_batch
from batchfinder.splitting.tree import tensors


class LastWindow:
    """Weighs each micro-batch by its share of the step's samples. The callback passes its own hooks on to these.

    How many samples a micro-batch has is known from the loader where it has a batch sampler of torch's kind and is the
    only one. Else it is the length that all tensors of the batch agree on; where they do not agree (a packed batch, a
    graph, several loaders) each micro-batch counts the same. A `training_step` that returned None counts like any
    other, as it does for Lightning. The mean is over samples: a loss that is a mean over tokens is
    weighed by samples as well.

    The hooks must run before a callback that looks at the gradients. GradScaler and DDP need nothing: a factor that is
    the same on every device, applied to the accumulated gradients, goes through both unchanged.

    Args:
        plan: what is accumulated, for a warning when an epoch is too short for it; None for no such warning.
    """

    def __init__(self, plan: AccumulationPlan | None = None) -> None:
        self.plan = plan
        self._sizes: list[int] = []  # of the window's micro-batches so far
        self._known = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if an epoch is too short for one step of the plan."""
        self._sizes = []
        if self.plan is not None:
            check_epoch_fills_a_step(trainer, self.plan)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note how many samples the micro-batch has."""
        samples = _samples(trainer, batch, batch_idx)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._sizes = []
        if not self._sizes:
            self._known = samples is not None
        self._sizes.append(samples if self._known and samples else (self._sizes or [1])[0])

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Weigh the micro-batch against the first one of its window."""
        if self._applies(trainer, pl_module) and self._sizes[-1] != self._sizes[0] and loss.requires_grad:
            weight = self._sizes[-1] / self._sizes[0]
            loss.register_hook(lambda gradient: gradient * weight)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Weigh the window. This runs before the gradients are clipped."""
        if not self._applies(trainer, pl_module):
            return
        divided_by, samples = trainer.accumulate_grad_batches * self._sizes[0], sum(self._sizes)
        if divided_by == samples:
            return
        with torch.no_grad():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(divided_by / samples)

    def _applies(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        return pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1 and bool(self._sizes)


def _samples(trainer: Trainer, batch: Any, batch_idx: int) -> int | None:
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    if len(loaders) == 1 and (samples := samples_in_batch(loaders[0], batch_idx)) is not None:
        return samples
    lengths = {len(tensor) for _, tensor in tensors(batch) if tensor.ndim}
    return lengths.pop() if len(lengths) == 1 else None
