"""Collectives that wait for no other rank, on PyTorch's `fake` backend, for steps that one rank takes alone.

A rank that runs out of memory while a size is tried leaves no other waiting in a collective. The fake backend gives
outputs of the right size: `all_gather` copies this rank's tensor for each rank, `all_reduce` and `broadcast` leave
tensors as they are. Only the default group is replaced; groups that the user's code has made are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


@contextmanager
def local_collectives() -> Iterator[None]:
    """Make the default group one of the fake backend. A single process keeps its own."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group = c10d._get_default_group()
    rank, size = group.rank(), group.size()
    new_group: Any = c10d._new_process_group_helper  # `dist.new_group` would wait for the other ranks
    timeout = dist.default_pg_timeout
    fake, _ = new_group(size, rank, list(range(size)), "fake", FakeStore(), "batchfinder", timeout=timeout)
    c10d._world.pg_group_ranks[fake] = {member: member for member in range(size)}
    c10d.GroupMember.WORLD = fake
    try:
        yield
    finally:
        c10d.GroupMember.WORLD = group
        dist.destroy_process_group(fake)


def leave_groups() -> None:
    """In a forked child, which cannot use its parent's connections: `torch.distributed` is not initialized here."""
    if dist.is_available() and dist.is_initialized():
        c10d.GroupMember.WORLD = None


def extra_groups() -> int:
    """How many process groups of several ranks this process is in besides the default one."""
    return sum(group.size() > 1 for group in c10d._world.pg_map if group is not c10d._get_default_group())
