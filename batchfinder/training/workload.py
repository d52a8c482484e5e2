"""What is trained: a model, its batches, and optionally its own loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model and all that is needed to take a training step with it.

    Attributes:
        model: the module, on the CPU (or made of fake tensors); it is moved to the device by the step.
        make_batch: `make_batch(batch_size, seq_len)` returns one micro-batch of CPU tensors: a mapping is passed to the
            model as keywords, a tuple or list as positional arguments, anything else as the one argument. `seq_len` is
            None for data of one fixed shape.
        loss: `loss(output, batch)` returns a scalar; by default the output's `.loss`, `["loss"]`, its first element, or
            the output itself where that is a scalar, else the mean of its floating-point elements.
        optimizer: `optimizer(parameters)` returns an optimizer; None leaves the choice to the caller's options.
        max_seq_len: the longest sequence the model's positions allow; None where there is no such limit.
        seq_len_unit: what a sequence length counts: `tokens`, `pixels`, or `none` for data of one fixed shape.
        zero_grad_after_loss: whether the old gradients go between the loss and the backward, as in a Lightning Trainer,
            rather than before the forward: they are there, then, while the forward fills the memory.
    """

    model: nn.Module
    make_batch: Callable[[int, int | None], Any]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    max_seq_len: int | None = None
    seq_len_unit: str = "tokens"
    zero_grad_after_loss: bool = False
