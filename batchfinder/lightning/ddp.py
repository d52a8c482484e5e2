"""The processes of a trainer: how they agree, and how one of them steps without the others.

When the gradients of several processes meet: once for each batch, however many micro-batches each has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from batchfinder.distributed.agreement import AgreedMemory, Ranks
from batchfinder.distributed.local_group import extra_groups, local_collectives
from batchfinder.measure.device_memory import Memory


def ranks_of(trainer: Any) -> Ranks:
    """Open a group of the trainer's processes; all of them call this. A meeting may take what the strategy allows.

    Where there are groups that the user's code has made, a warning says what that means for tries.

    Args:
        trainer: set up.
    """
    if trainer.world_size == 1:
        return Ranks()
    others = extra_groups()
    if others:
        rank_zero_warn(
            f"This run has {others} process group{'s' * (others > 1)} besides the default one. Collectives over such a "
            "group are not left out while BatchFinder tries sizes: where a rank runs out of memory, the others wait in "
            "them for as long as the group allows. If a step uses one, find the size with Trainer(devices=1)."
        )
    return Ranks.open(getattr(trainer.strategy, "_timeout", None))


def agreed_memory(memory: Memory, ranks: Ranks) -> Memory:
    """A device's memory, of which as much is free as on the rank with the least.

    Args:
        memory: this rank's device's.
        ranks: who agrees.
    """
    return memory if ranks.size == 1 else AgreedMemory(memory, ranks)


def agreed_data(cap: int | None, seq_len: int | None, ranks: Ranks) -> tuple[int | None, int | None]:
    """The smallest cap and the longest length that any rank sees in its data; None where no rank sees one.

    Args:
        cap: the largest size of use to this rank.
        seq_len: this rank's longest length.
        ranks: who agrees.
    """
    caps, lengths = zip(*ranks.gathered((cap, seq_len)), strict=True)
    return (
        min((cap for cap in caps if cap is not None), default=None),
        max((length for length in lengths if length is not None), default=None),
    )


@contextmanager
def local_only(trainer: Any) -> Iterator[None]:
    """Let steps synchronise nothing: no gradients, buffers, metrics or flags. What DDP holds stays in memory.

    Args:
        trainer: set up. Its strategy steps with the bare module inside.
    """
    if trainer.world_size == 1:
        yield
        return
    strategy = trainer.strategy
    wrapped = strategy.model
    strategy.model = trainer.lightning_module
    strategy.broadcast = lambda obj, src=0: obj  # what is sent as an object cannot be echoed
    try:
        with local_collectives():
            yield
    finally:
        vars(strategy).pop("broadcast", None)
        strategy.model = wrapped


def forget_used_parameters(trainer: Any) -> None:
    """Make DDP anew where it notes which parameters a backward reaches: it has noted those of the steps without it.

    With `find_unused_parameters` it would take a parameter for used that the first batch of training does not use, and
    with `static_graph` it would wait for as many gradients as all tries had. The weights are not sent round again.

    Args:
        trainer: after steps in `local_only`, with no gradients.
    """
    strategy = trainer.strategy
    wrapped = strategy.model
    if not isinstance(wrapped, DistributedDataParallel):
        return
    if not (wrapped.find_unused_parameters or wrapped.static_graph):
        return
    options = strategy._ddp_kwargs
    strategy.model = trainer.lightning_module
    del wrapped  # the old one's hooks on the parameters go with it
    strategy._ddp_kwargs = {**options, "init_sync": False}
    try:
        strategy.configure_ddp()
    finally:
        strategy._ddp_kwargs = options


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
