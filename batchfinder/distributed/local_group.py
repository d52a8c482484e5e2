"""Collectives of `torch.distributed` that are answered in this process, as if every rank held what this one holds.

While a size is tried, a rank that runs out of memory cannot leave the others waiting in a collective, since there is
none: a metric that is reduced, a SyncBatchNorm and `all_gather` of the user's take the memory that they take in
training, and wait for nobody. Only the default group is replaced; a group that the user has made is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

_TABLES = ("pg_map", "pg_names", "pg_backend_config", "pg_group_ranks", "pg_to_tag")
"""What PyTorch looks up of a group (`torch.distributed.distributed_c10d._world`)."""


@contextmanager
def local_collectives() -> Iterator[None]:
    """Let the default group be one whose every rank holds what this one holds. A single process has no need of it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    world = c10d._world
    group = c10d._get_default_group()
    echo = LocalProcessGroup(group.rank(), group.size())
    tables = [getattr(world, name) for name in _TABLES if group in getattr(world, name, {})]
    for table in tables:
        table[echo] = table[group]
    _c10d._register_process_group(_NAME, echo)
    c10d.GroupMember.WORLD = echo
    try:
        yield
    finally:
        c10d.GroupMember.WORLD = group
        _c10d._unregister_process_group(_NAME)
        for table in tables:
            table.pop(echo, None)


def extra_groups() -> int:
    """How many process groups of several ranks this process is in besides the default one."""
    return sum(group.size() > 1 for group in c10d._world.pg_map if group is not c10d._get_default_group())


_c10d: Any = getattr(torch._C, "_distributed_c10d", None)
_Group: Any = dist.ProcessGroup
_NAME = "batchfinder-echo"


class LocalProcessGroup(_Group):  # type: ignore[misc]
    """A group whose other ranks hold what this one holds.

    What a rank broadcasts is here already: a floating tensor stays as it is, and others, which say how much is to come,
    are zero. What is received from one rank alone is zero too.

    Args:
        rank: this process's number, from 0.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def rank(self) -> int:
        """This process's number."""
        return self._rank

    @property
    def group_name(self) -> str:
        """What functional collectives know it by."""
        return _NAME

    def getBackendName(self) -> str:
        """Asked by PyTorch's own modules."""
        return "gloo"

    def barrier(self, opts: Any = None) -> Any:
        """Nobody is waited for."""
        return _done([])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """What another rank sends is taken to be what is here."""
        root = getattr(opts, "rootRank", 0)
        for tensor in tensors:
            if root != self._rank and not (tensor.is_floating_point() or tensor.is_complex()):
                tensor.detach().zero_()
        return _done(tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """A sum is as many times the tensor as there are ranks."""
        for tensor in tensors:
            self._reduce_in_place(tensor, opts)
        return _done(tensors)

    allreduce_coalesced = allreduce
    reduce = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Each rank's part is this one's."""
        for parts, tensor in zip(outputs, inputs, strict=True):
            for part in parts:
                part.detach().copy_(tensor.detach())
        return _done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """The same, into one tensor."""
        output.detach().view(self._size, -1).copy_(tensor.detach().reshape(1, -1))
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """The same, for several."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """As `allgather`, for the one rank that has places for them."""
        return self.allgather(outputs, inputs) if outputs else _done([])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """This rank's part, where it is this rank that hands them out."""
        for output, parts in zip(outputs, inputs, strict=False):
            output.detach().copy_(parts[self._rank].detach())
        return _done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """This rank's part, reduced."""
        for output, parts in zip(outputs, inputs, strict=True):
            output.detach().copy_(parts[self._rank].detach())
            self._reduce_in_place(output, opts)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """The same, from one tensor."""
        return self.reduce_scatter([output], [list(tensor.detach().chunk(self._size))], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """The same, for several."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Each rank sends what this one keeps for itself; zeros where it is of another shape."""
        mine = inputs[self._rank].detach()
        for output in outputs:
            output.detach().copy_(mine) if output.shape == mine.shape else output.detach().zero_()
        return _done(outputs)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Any:
        """Zeros of the shape that comes back."""
        output.detach().zero_()
        return _done([output])

    all_to_all_single = alltoall_base

    def send(self, tensors: list[Tensor], *to: Any) -> Any:
        """Nobody is there to receive it."""
        return _done(tensors)

    def recv(self, tensors: list[Tensor], *of: Any) -> Any:
        """Zeros."""
        for tensor in tensors:
            tensor.detach().zero_()
        return _done(tensors)

    recv_anysource = recv

    def _reduce_in_place(self, tensor: Tensor, opts: Any) -> None:
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if operation == dist.ReduceOp.SUM:
            tensor.detach().mul_(self._size)
        elif operation == dist.ReduceOp.PRODUCT:
            tensor.detach().pow_(self._size)


def _done(result: Any) -> Any:
    """What a collective that is over returns."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _c10d._create_work_from_future(future)
