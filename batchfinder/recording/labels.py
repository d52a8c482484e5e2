"""What a step's blocks are for, told to a recorder as the step is taken: the same for both recorders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from batchfinder.recording import distributed
from batchfinder.training.optimizers import states_of
from batchfinder.training.step import Step


class BlockLabels(Protocol):
    """A recorder as far as it is told things."""

    @property
    def blocks(self) -> int:
        """How many have been allocated so far."""

    def mark(self, step: int, stage: str, micro_batch: int = 0) -> None:
        """A stage starts here."""

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str, module: str) -> None:
        """Say what the storages of these tensors are for and which module holds them."""

    def label_alive(self, first: int, kind: str) -> None:
        """Say what the blocks from number `first` on that are still alive are for."""


class StepLabels:
    """Labels what a step's stages leave, and at its end what stays.

    Args:
        step: that is taken; `Step.run` calls `begin` as each stage begins.
        recorder: that is told.

    Attributes:
        first: the first block that may be of the stage under way.
    """

    def __init__(self, step: Step, recorder: BlockLabels) -> None:
        self._step = step
        self._recorder = recorder
        self.first = 0

    def placed(self) -> None:
        """The model is on the card. What else is there is what sums gradients, and so is what DDP makes later."""
        model, recorder = self._step.workload.model, self._recorder
        if self._step.config.gpus == 1:
            return
        recorder.label_alive(0, "communication")

        def rebuilt(*_: object) -> None:
            recorder.label_alive(self.first, "communication")
            self.first = recorder.blocks

        if (inner := distributed.without_ddp(model)) is not model:
            inner.register_forward_pre_hook(rebuilt)

    def begin(self, number: int, stage: str, micro_batch: int) -> None:
        """A stage begins: what the one before has left is what the stage is known for."""
        recorder, model = self._recorder, distributed.without_ddp(self._step.workload.model)
        if stage == "forward":
            recorder.label_alive(self.first, "input")
        elif stage == "backward" or (stage == "end" and self._step.config.mode != "train"):
            recorder.label_alive(self.first, "activation")
        elif stage == "optimizer":
            for name, parameter in model.named_parameters():
                recorder.label([parameter.grad], "gradient", name.rpartition(".")[0])
            for unit, whole in distributed.flat_parameters(model):
                recorder.label([whole.grad], "gradient", unit)
            recorder.label([getattr(self._step.optimizer, "summed", None)], "gradient", "")
        if stage in ("batch", "forward"):
            self.first = recorder.blocks
        recorder.mark(number, stage, micro_batch)

    def end(self) -> None:
        """The step has been taken: weights, buffers and the optimizer's state."""
        recorder, optimizer = self._recorder, self._step.optimizer
        model = distributed.without_ddp(self._step.workload.model)
        for name, buffer in model.named_buffers():
            recorder.label([buffer], "buffer", distributed.name_in_model(name).rpartition(".")[0])
        holders: dict[torch.Tensor, str] = {}
        for name, parameter in model.named_parameters():
            holders[parameter] = distributed.name_in_model(name).rpartition(".")[0]
            if parameter.numel():  # of a parameter that is in another GPU's shard there is an empty one in each step
                recorder.label([parameter], "parameter", holders[parameter])
        for unit, whole in distributed.flat_parameters(model):
            recorder.label([whole], "parameter", unit)
        for stepped, state in states_of(optimizer) if optimizer is not None else ():
            recorder.label(state, "optimizer", holders.get(stepped, ""))
