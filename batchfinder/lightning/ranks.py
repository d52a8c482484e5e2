"""The processes of a trainer: how they agree, and how one of them steps without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from batchfinder.probing.agreed import AgreedMemory
from batchfinder.probing.agreeing import Ranks
from batchfinder.probing.echo import echoing, other_groups
from batchfinder.probing.memory import Memory


def ranks_of(trainer: Any) -> Ranks:
    """Open a group of the trainer's processes; all of them call this. A meeting may take what the strategy allows.

    Where there are groups that the user's code has made, a warning says what that means for tries.

    Args:
        trainer: set up.
    """
    if trainer.world_size == 1:
        return Ranks()
    others = other_groups()
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
def without_the_others(trainer: Any) -> Iterator[None]:
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
        with echoing():
            yield
    finally:
        vars(strategy).pop("broadcast", None)
        strategy.model = wrapped


def forget_used_parameters(trainer: Any) -> None:
    """Make DDP anew where it notes which parameters a backward reaches: it has noted those of the steps without it.

    With `find_unused_parameters` it would take a parameter for used that the first batch of training does not use, and
    with `static_graph` it would wait for as many gradients as all tries had. The weights are not sent round again.

    Args:
        trainer: after steps in `without_the_others`, with no gradients.
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
