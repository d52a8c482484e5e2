"""When the gradients of several processes meet: once for each batch, however many micro-batches each has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class GradientSync:
    """One process: there is nobody to meet."""

    def begin(self) -> None:
        """Before the first micro-batch of a batch."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around a forward and backward.

        Args:
            last: whether it is the batch's last.
        """
        return nullcontext()

    def finish(self) -> None:
        """After the last micro-batch of a batch, on all ranks."""


class LastBackwardSync(GradientSync):
    """DDP's own way: gradients meet while the last backward runs.

    Args:
        model: wrapped in DDP.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """DDP's `no_sync` for all but the last.

        Args:
            last: whether it is the batch's last.
        """
        context: AbstractContextManager[None] = nullcontext() if last else self._model.no_sync()
        return context


class AfterwardsSync(GradientSync):
    """Gradients meet when all ranks are through with the batch, so that no rank that fails leaves another waiting.

    What DDP does together with the other ranks before a forward (buckets in the order of the first backward, buffers as
    rank 0 has them) is done before the first micro-batch. After the last, a backward that adds nothing makes DDP reduce
    what is there: its buckets, communication hooks and unused parameters are as ever.

    Args:
        model: wrapped in DDP.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model: Any = model

    def begin(self) -> None:
        """Do now what a forward would do together with the other ranks."""
        model = self._model
        if model.reducer._rebuild_buckets():
            model._has_rebuilt_buckets = True
        if model._check_sync_bufs_pre_fwd():
            model._sync_buffers()
        model.require_forward_param_sync = False

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """DDP's `no_sync`, always.

        Args:
            last: whether it is the batch's last.
        """
        context: AbstractContextManager[None] = self._model.no_sync()
        return context

    def finish(self) -> None:
        """Reduce the gradients."""
        model, module = self._model, self._model.module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if model.find_unused_parameters:  # one without a gradient is to look unused, as after any other backward
            trained = [parameter for parameter in trained if parameter.grad is not None] or trained
        with torch.enable_grad():
            forward = vars(module).get("forward")
            add_nothing: Any = _AddNothing.apply
            module.forward = lambda anchor: add_nothing(anchor, *trained)
            try:
                loss = model(torch.zeros((), device=trained[0].device))
            finally:
                del module.forward
                if forward is not None:
                    module.forward = forward
            loss.backward()


def gradient_sync(strategy: Any, recover: bool) -> GradientSync:
    """How the gradients of a trainer's processes meet.

    Args:
        strategy: the trainer's, set up.
        recover: whether a batch may be run again.

    Raises:
        MisconfigurationException: DDP's static graph counts backwards, of which each rank may have another number.
    """
    model = strategy.model
    if not isinstance(model, DistributedDataParallel):
        return GradientSync()
    if model.static_graph:
        raise MisconfigurationException(
            "BatchFinder(split_batches=True) makes as many micro-batches as a batch's lengths ask for, and "
            "DDPStrategy(static_graph=True) expects the same backwards each time. Leave static_graph out."
        )
    # With unused parameters DDP looks at the last backward alone, and would leave out what only earlier ones used.
    return AfterwardsSync(model) if recover or model.find_unused_parameters else LastBackwardSync(model)


class _AddNothing(torch.autograd.Function):
    """A loss of 0 on which all parameters depend, whose gradient is 0 and takes no memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [
            (parameter.shape, parameter.dtype, parameter.device, _is_sparse(parameter.grad)) for parameter in parameters
        ]
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (None, *(_nothing(*like) for like in ctx.like))


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse


def _nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device, sparse: bool) -> Tensor:
    if sparse:  # a dense one would make the gradient dense
        return torch.zeros(shape, dtype=dtype, device=device, layout=torch.sparse_coo)
    return torch.zeros((), dtype=dtype, device=device).expand(shape)
