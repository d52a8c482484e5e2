"""In one process of a training of many GPUs: answers for the ranks that are not there.

Importing this is all it takes. NCCL's answers are the CUDA stub's, which takes all ranks to be as this one. A store has
what this process puts there, no barrier waits, and a Gloo group is PyTorch's fake one, which returns what it is given.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist


def answer_for_all() -> None:
    """Have process groups of any size be made by this process alone."""
    fake: Any = importlib.import_module("torch._C._distributed_c10d").FakeProcessGroup
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make = getattr(fake, "_create_internal", fake)

    class FakeGloo(type):
        def __call__(cls, store: Any, rank: int, size: int, **_: Any) -> Any:
            return make(rank, size)

        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, fake)

    rendezvous._create_c10d_store = lambda *_, **__: dist.HashStore()  # type: ignore[attr-defined]
    c10d._store_based_barrier = lambda *_, **__: None
    c10d.ProcessGroupGloo = FakeGloo("ProcessGroupGloo", (), {})
    fake._set_sequence_number_for_group = lambda _: None


if dist.is_available():
    answer_for_all()
