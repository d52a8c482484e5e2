"""A trainer's ranks: their group, steps that one rank takes alone, and one all-reduce of gradients for each batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import Strategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from batchfinder.distributed.agreement import (
    Ranks,
    can_reduce_alone,
    connect_groups,
    forget_trials,
    free_buckets,
    local_collectives,
    reduce_alone,
)
from batchfinder.lightning.compat import collective_timeout, synchronize_before_forward


def ranks_of(trainer: Trainer) -> Ranks:
    """Open a group of the trainer's ranks, with the strategy's timeout. All ranks call this."""
    if trainer.world_size == 1:
        return Ranks()
    connect_groups(trainer.strategy.root_device)
    return Ranks.open(collective_timeout(trainer.strategy))


def data_parallel_size(trainer: Trainer) -> int:
    """How many devices train on samples of their own: all of them, but where layers are spread over several."""
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size))


@contextmanager
def local_only(trainer: Trainer, as_in_training: bool = False) -> Iterator[None]:
    """Let steps synchronize nothing: no gradients, buffers, metrics or flags. What DDP holds stays in memory.

    FSDP gathers and frees as in training, from this rank alone.

    Args:
        as_in_training: whether steps go through DDP, with a new reducer, which takes as much as the gradients once more
            while it builds its buckets anew in the second forward. `end_trials` has to follow on all ranks.
    """
    if trainer.world_size == 1:
        yield
        return
    strategy = trainer.strategy
    wrapped = strategy.model
    if isinstance(wrapped, DistributedDataParallel):
        if as_in_training and can_reduce_alone(wrapped):
            reduce_alone(wrapped)
        else:
            strategy.model = trainer.lightning_module
    vars(strategy)["broadcast"] = lambda obj, src=0: obj  # the fake backend receives no object
    try:
        with local_collectives():
            yield
    finally:
        vars(strategy).pop("broadcast", None)
        strategy.model = wrapped


def begin_trials(trainer: Trainer) -> None:
    """Before the training state is copied: take away DDP's reducer, of which each trial has one of its own."""
    model = trainer.strategy.model
    if trainer.world_size > 1 and isinstance(model, DistributedDataParallel):
        free_buckets(model)


def end_trials(trainer: Trainer) -> None:
    """Give DDP a reducer that knows of no trial."""
    model = trainer.strategy.model
    if trainer.world_size > 1 and isinstance(model, DistributedDataParallel):
        forget_trials(model)


@dataclass(frozen=True)
class GradientSync:
    """When DDP all-reduces the gradients of a batch that runs in micro-batches.

    DDP's own way is to all-reduce while the last backward runs. `afterwards` all-reduces when all ranks have finished
    the batch, so that a rank that fails leaves none waiting: DDP's collectives before a forward (rebuilding buckets,
    broadcasting buffers) run before the first micro-batch; after the last, a backward of a zero gradient makes DDP
    reduce what has accumulated, with its buckets, communication hooks and unused parameters.
    """

    model: DistributedDataParallel | None = None  # a single process, where nothing is synchronized
    afterwards: bool = False

    def begin(self) -> None:
        """Called before the first micro-batch of a batch."""
        if self.model is not None and self.afterwards:
            synchronize_before_forward(self.model)
            self.model.require_forward_param_sync = False  # else each forward broadcasts; a rank that failed waits

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """A context for a forward and backward; `last` for the last ones of a batch."""
        if self.model is None or (last and not self.afterwards):
            return nullcontext()
        context: AbstractContextManager[None] = self.model.no_sync()
        return context

    def finish(self) -> None:
        """Called after the last micro-batch of a batch, on all ranks."""
        if self.model is None or not self.afterwards:
            return
        module: Any = self.model.module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self.model.find_unused_parameters:  # one without a gradient is to look unused, as after any other backward
            trained = [parameter for parameter in trained if parameter.grad is not None] or trained
        with torch.enable_grad():
            forward = vars(module).get("forward")
            add_nothing: Any = _AddNothing.apply
            module.forward = lambda anchor: add_nothing(anchor, *trained)
            try:
                loss = self.model(torch.zeros((), device=trained[0].device))
            finally:
                del module.forward
                if forward is not None:
                    module.forward = forward
            loss.backward()


def gradient_sync(strategy: Strategy, recover: bool) -> GradientSync:
    """When gradients are all-reduced; `recover` says whether a batch may be run again after an out-of-memory error.

    Raises:
        MisconfigurationException: DDP has a static graph, which has as many backwards in each step.
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
    return GradientSync(model, afterwards=recover or model.find_unused_parameters)


class _AddNothing(torch.autograd.Function):
    """A loss of 0 on which all parameters depend, whose gradients are 0 and take no memory."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [
            (
                parameter.shape,
                parameter.dtype,
                parameter.device,
                parameter.grad is not None and parameter.grad.is_sparse,
            )
            for parameter in parameters
        ]
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        zeros = []
        for shape, dtype, device, sparse in ctx.like:
            if sparse:  # a dense one would make the gradient dense
                zeros.append(torch.zeros(shape, dtype=dtype, device=device, layout=torch.sparse_coo))
            else:
                zeros.append(torch.zeros((), dtype=dtype, device=device).expand(shape))
        return (None, *zeros)
