"""torch-max-mem's maximize_memory_utilization; as its README says, from the largest sensible size."""

from __future__ import annotations

from benchmarks.peer.contract import Found, Peer
from benchmarks.peer.state import changed
from benchmarks.peer.work import Work

LARGE = 8192


def _find(work: Work) -> Found:
    from torch_max_mem import maximize_memory_utilization

    training = work.training()
    before = training.state()

    @maximize_memory_utilization()
    def train(batch_size: int) -> int:
        return training.train(batch_size)

    found = train(batch_size=LARGE if work.cap is None else min(LARGE, work.cap))
    work.end()
    return Found(found, tuple(changed(before, training.state())))


PEERS = (
    Peer(
        f"torch-max-mem, from {LARGE}",
        "torch_max_mem",
        "loop",
        _find,
        "only downwards, by halves; made for batched computation on a GPU, and its version 0.1.6 does not know the "
        "words of PyTorch's CPU allocator on Linux; the call is the work itself, so nothing is put back by design",
    ),
)
