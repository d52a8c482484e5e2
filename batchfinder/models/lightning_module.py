"""A LightningModule as a workload: its training_step and configure_optimizers, called without a Trainer.

It is recognised by its methods, so that Lightning is imported only where the user's own code does so. Of its hooks only
`configure_model` runs; `setup` and data loading do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from batchfinder.errors import InvalidValue
from batchfinder.training.step import Workload

_LOGGING = ("log", "log_dict", "print")


def has_training_step(module: nn.Module) -> bool:
    """Whether this is a LightningModule, or a module with the same methods."""
    return callable(getattr(module, "training_step", None)) and callable(getattr(module, "configure_optimizers", None))


def workload_from_training_step(module: nn.Module, what: str, run_user_code: Callable[..., Any]) -> Workload:
    """Make a workload of a module with `training_step`, `configure_optimizers` and `make_batch`.

    Messages call it `what`; `run_user_code(what, function)` calls its methods.

    Raises:
        InvalidValue: it uses manual optimization, or has none or several optimizers.
        UserCodeFailed: its `configure_model` or `configure_optimizers` raised.
    """
    if type(module).__name__ == "OptimizedModule":  # torch.compile(module): Lightning has its steps compiled so
        compiled: Any = module
        module = compiled._orig_mod
        module.training_step = compiled.dynamo_ctx(module.training_step)
    name = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        expected = f"automatic optimization; {name} uses manual optimization, which the simulator does not support yet"
        raise InvalidValue("model", what, expected)
    if callable(configure_model := getattr(module, "configure_model", None)):
        run_user_code(f"{what} ({name}.configure_model)", configure_model)
    user: Any = module
    # Called once here, so that what cannot be simulated is refused before anything is recorded.
    _single_optimizer(run_user_code(f"{what} ({name}.configure_optimizers)", user.configure_optimizers), name, what)
    return Workload(
        model=TrainingStep(module),
        # A batch reaches the model as one argument, whatever it is made of.
        make_batch=lambda batch_size, seq_len: (user.make_batch(batch_size, seq_len),),
        loss=_loss,
        # Asked for when the parameters are where they will be trained.
        optimizer=lambda parameters: _single_optimizer(user.configure_optimizers(), name, what),
        # `Closure.closure` in pytorch_lightning/loops/optimization/automatic.py: training_step, zero_grad, backward.
        zero_grad_after_loss=True,
    )


class TrainingStep(nn.Module):
    """A module whose forward is another module's training step, so that hooks see the names inside it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        """Run the training step on a whole batch, as batch 0."""
        # `self.log` and `self.print` do nothing without a Trainer: they would warn at every step, or raise.
        own = vars(self.module)
        replaced = [name for name in _LOGGING if hasattr(self.module, name) and name not in own]
        if getattr(self.module, "_trainer", None) is not None:
            replaced = []
        for name in replaced:
            own[name] = lambda *args, **kwargs: None
        try:
            return call_step(self.module.training_step, batch)
        finally:
            for name in replaced:
                own.pop(name, None)


def call_step(step: Any, batch: Any) -> Any:
    """Call a LightningModule's `training_step`, `validation_step`, ... as Lightning's loops do: by position.

    `batch_idx` is passed to every step that takes two arguments, whatever their names, and `dataloader_idx` where the
    third is called so. Source: `is_param_in_hook_signature` in
    https://github.com/Lightning-AI/pytorch-lightning/blob/2.5.0/src/lightning/pytorch/utilities/signature_utils.py
    and its uses in `_TrainingEpochLoop` and `_EvaluationLoop`. The batch is batch 0 of dataloader 0.
    """
    parameters = list(inspect.signature(step).parameters.values())
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if named[2:3] == ["dataloader_idx"]:
        return step(batch, 0, 0)
    takes_index = len(named) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return step(batch, 0) if takes_index else step(batch)


def _single_optimizer(configured: Any, name: str, what: str) -> torch.optim.Optimizer:
    """Return the one optimizer among what `configure_optimizers` may return.

    An optimizer, a list or tuple of them, (optimizers, schedulers), a dict with "optimizer", or a list of such dicts:
    https://lightning.ai/docs/pytorch/stable/common/lightning_module.html#configure-optimizers
    """
    given = configured
    if isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[0], list):
        given = given[0]
    if not isinstance(given, list | tuple):
        given = [given]
    optimizers = [entry.get("optimizer") if isinstance(entry, Mapping) else entry for entry in given]
    if len(optimizers) > 1:
        raise InvalidValue(
            "model", what, f"one optimizer: {name} has {len(optimizers)}, which the simulator does not support yet"
        )
    if not optimizers or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise InvalidValue("model", what, f"an optimizer from {name}.configure_optimizers, not {configured!r}")
    return optimizers[0]


def _loss(output: Any, batch: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise InvalidValue(
            "model", type(output).__name__, 'a training_step that returns a tensor or a dict with "loss"'
        )
    return loss
