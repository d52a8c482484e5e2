"""A trainer's own step as a workload, rebuilt in the recording process from the structure of its parts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from batchfinder.data.batch import map_leaves, tensors
from batchfinder.lightning.compat import is_a
from batchfinder.lightning.portable_pickle import read
from batchfinder.recording import fake_device
from batchfinder.training.workload import Workload

_LOGGING = ("log", "log_dict", "print")


@dataclass(frozen=True)
class Parts:
    """What a step is made of.

    Attributes:
        module: the module, as it stands when training starts.
        trainer: its trainer, of which plain attributes arrive.
        step: the method that takes a batch: `training_step`, `validation_step`, ...
        batches: a batch on the host for each size that may be recorded.
        default_dtype: the type of tensors that the step makes without naming one.
        optimizer: its class; None where nothing is trained.
        defaults: the optimizer's options.
        groups: its parameter groups.
        foreach: whether an optimizer that was not told otherwise runs on lists of tensors, as it does on a GPU.
    """

    module: Any
    trainer: Any
    step: str
    batches: Mapping[int, Any]
    default_dtype: torch.dtype
    optimizer: type[torch.optim.Optimizer] | None
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]
    foreach: bool


def build(path: str, search_path: list[str]) -> Workload:
    """Read a step's parts and put them together.

    Args:
        path: the file that `structure.write` made of `Parts`.
        search_path: where the process that wrote it finds its modules.
    """
    sys.path.extend(entry for entry in search_path if entry not in sys.path)
    step = RebuiltStep(read(Path(path), fake_device.register()))
    return Workload(
        model=step, make_batch=step.make_batch, loss=_loss, optimizer=step.optimizer, zero_grad_after_loss=True
    )


class RebuiltStep(nn.Module):
    """A module whose forward is another's step on a batch, given as the batch's tensors.

    Args:
        parts: what it is made of.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.module
        self._parts = parts
        self._batch: Any = None
        parameters = {id(parameter): number for number, parameter in enumerate(parts.module.parameters())}
        self._numbers = [[parameters[id(parameter)] for parameter in group["params"]] for group in parts.groups]
        silent = _Silent()
        vars(parts.trainer).update(logger=silent, loggers=[silent], callbacks=[], datamodule=None)
        for part in parts.module.modules():
            if is_a(part, "LightningModule"):
                vars(part).update({"_trainer": parts.trainer, **dict.fromkeys(_LOGGING, silent)})

    def train(self, mode: bool = True) -> RebuiltStep:
        """Training keeps each part's own mode, as Lightning does; evaluation sets all of them."""
        return self if mode else super().train(False)

    def make_batch(self, batch_size: int, seq_len: int | None) -> tuple[torch.Tensor, ...]:
        """The tensors of a batch.

        Args:
            batch_size: its samples.
            seq_len: not used: batches come in their length.

        Raises:
            KeyError: no batch of this size was brought along.
        """
        self._batch = self.module.on_before_batch_transfer(self._parts.batches[batch_size], 0)
        return tuple(tensor for _, tensor in tensors(self._batch))

    def forward(self, *moved: torch.Tensor) -> Any:
        """Take the step.

        Args:
            moved: the batch's tensors, on the device.
        """
        left = iter(moved)
        batch = map_leaves(lambda path, leaf: next(left) if isinstance(leaf, torch.Tensor) else leaf, self._batch)
        with _default_dtype(self._parts.default_dtype):
            with torch.autocast(fake_device.DEVICE_TYPE, enabled=False):
                batch = self.module.on_after_batch_transfer(batch, 0)
            step = getattr(self.module, self._parts.step)
            takes = signature(step).parameters
            return step(batch, *((0,) if len(takes) > 1 else ()))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer, made again for the parameters where they are now.

        Args:
            parameters: not used: the groups say which.
        """
        make: Any = self._parts.optimizer
        here = list(self.module.parameters())
        groups = [
            {**group, "params": [here[number] for number in numbers]}
            for group, numbers in zip(self._parts.groups, self._numbers, strict=True)
        ]
        if not self._parts.foreach:
            groups = [{**group, "foreach": False} if group.get("foreach", 0) is None else group for group in groups]
        taken = signature(make).parameters
        optimizer: torch.optim.Optimizer = make(
            groups, **{name: value for name, value in self._parts.defaults.items() if name in taken}
        )
        return optimizer


def _loss(output: Any, batch: Any) -> torch.Tensor:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the step returned {type(loss).__name__} and no loss")
    return loss


class _Silent:
    """Stands for a logger and what it has: whatever it is asked for or called with, it does nothing."""

    def __getattr__(self, name: str) -> _Silent:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Silent:
        return self


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
