"""The simulated allocator beside PyTorch's own: the same requests, and after each the same block and counters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.allocator import CachingAllocator
from batchfinder.simulator.blocks import Block, DeviceMemory, SimulatedOutOfMemory
from batchfinder.testing import CudaStub, CudaStubFixture

pytestmark = pytest.mark.cuda_build
MIB = 1 << 20
MEMORY = 1 << 30
Requests = list[tuple[int, int]]
Seen = tuple[int, int, int, int, int]


def requests_of(seed: int, count: int = 1500) -> Requests:
    """What to allocate (its bytes), and which of the live blocks to give back (-1, or its place), in turn.

    Sizes come again, as a step's do, so that free blocks of one size have to be chosen from; and the card gets full.
    """
    r = random.Random(seed)
    sizes = [int(2 ** r.uniform(12, 27)) for _ in range(12)]
    requests, alive = [], 0
    for _ in range(count):
        if alive and r.random() < 0.46:
            requests.append((0, r.randrange(alive)))
            alive -= 1
        else:
            requests.append((r.choice(sizes), -1))
            alive += 1
    return requests


def really(requests: Requests) -> list[Seen]:
    """On the card: where each block lies (its segment by age, and its place there), and what is counted after it."""
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, context=None, stacks="python")
    seen, alive = [], []
    for nbytes, place in requests:
        if place >= 0:
            alive.pop(place)
            continue
        try:
            alive.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            alive.append(None)
        stats = torch.cuda.memory_stats()
        counters = [stats[f"{name}_bytes.all.current"] for name in ("allocated", "reserved")]
        seen.append((0 if alive[-1] is None else alive[-1].data_ptr(), *counters, stats["num_alloc_retries"]))
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    return list(placed(seen, [(event["action"], event.get("addr", 0), event["size"]) for event in events]))


def placed(seen: list[Any], events: list[tuple[str, int, int]]) -> Any:
    """Addresses as the number of the segment, by age, and the place in it."""
    blocks = iter(seen)
    segments: dict[int, tuple[int, int]] = {}
    number = 0
    for action, address, size in events:
        if action in ("segment_alloc", "segment_map"):
            segments[address] = number, size
            number += 1
        elif action in ("segment_free", "segment_unmap"):
            segments.pop(address, None)
        elif action == "oom":
            yield -1, 0, *next(blocks)[1:]
        elif action == "alloc":
            start = max(each for each in segments if each <= address)
            yield segments[start][0], address - start, *next(blocks)[1:]


def simulated(requests: Requests, settings: AllocatorSettings) -> list[Seen]:
    """The same of the simulated allocator."""
    allocator = CachingAllocator(DeviceMemory(MEMORY, MEMORY), settings)
    segments: dict[int, tuple[int, int]] = {}
    numbers = iter(range(1 << 20))

    def watch(action: str, address: int, nbytes: int, stream: int) -> None:
        if action in ("alloc", "map"):
            segments[address] = next(numbers), nbytes
        else:
            segments.pop(address, None)

    allocator.watch_segments(watch)
    seen: list[Seen] = []
    alive: list[Block | None] = []
    for nbytes, place in requests:
        if place >= 0:
            allocator.free(alive.pop(place))
            continue
        try:
            block = allocator.allocate(nbytes)
        except SimulatedOutOfMemory:
            block = None
        alive.append(block)
        if block is None:
            where = -1, 0
        else:
            start = max(each for each in segments if each <= block.address)
            where = segments[start][0], block.address - start
        seen.append((*where, allocator.allocated, allocator.reserved, allocator.num_alloc_retries))
    return seen


def compare(stub: CudaStub, requests: Requests, settings: AllocatorSettings) -> None:
    """Every block and every counter is the same, on a card that gets full."""
    real = [tuple(each) for each in stub.run(really, requests).result]
    assert real[-1][4] > 0, "the card never got full"
    for number, (ours, theirs) in enumerate(zip(simulated(requests, settings), real, strict=True)):
        assert ours == theirs, f"allocation {number}"


@pytest.mark.parametrize(
    ("allocator", "seed"),
    [("", 2), ("max_split_size_mb:64", 0), ("roundup_power2_divisions:4", 2), ("expandable_segments:True", 0)],
)
def test_each_block_is_the_one_that_pytorch_takes(cuda_stub: CudaStubFixture, allocator: str, seed: int) -> None:
    """Of equal free blocks that in the oldest segment."""
    compare(cuda_stub(memory=MEMORY, allocator=allocator), requests_of(seed), AllocatorSettings.parse(allocator))
