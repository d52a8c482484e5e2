"""A callback that makes up a target by accumulation: sets it, weighs each window's micro-batches, and puts it back."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from batchfinder.accumulation import AccumulationPlan
from batchfinder.lightning.accumulate import apply_accumulation
from batchfinder.lightning.feedback import Applied
from batchfinder.lightning.last_window import LastWindow


class Accumulating(Callback):  # type: ignore[misc, unused-ignore]
    """A callback that accumulates by its plan, and leaves micro-batches that anybody else accumulates alone.

    Attributes:
        plan: how a target is made up; None without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: AccumulationPlan | None = None
        self._accumulated = Applied()
        self._last_window = LastWindow()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn if an epoch is too short for the plan."""
        self._last_window.on_train_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count samples, for the weight of an epoch's last window."""
        if self.plan is not None:
            self._last_window.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Weigh a micro-batch that is smaller than its window's first."""
        if self.plan is not None:
            self._last_window.on_before_backward(trainer, pl_module, loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Weigh a window that is shorter than the plan's."""
        if self.plan is not None:
            self._last_window.on_before_optimizer_step(trainer, pl_module, optimizer)

    def _accumulate(self, trainer: Any, plan: AccumulationPlan | None) -> None:
        """Accumulate by a plan from now on; without one, as the trainer does."""
        self.plan, self._last_window = plan, LastWindow(plan)
        if plan is None:
            return
        replaced = trainer.accumulate_grad_batches != 1
        self._accumulated = apply_accumulation(trainer, plan)
        if replaced:  # else the summary has said all of it
            for line in self._accumulated:
                rank_zero_info(f"BatchFinder: {line}.")
