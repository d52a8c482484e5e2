"""What was alive at a peak, from histories as PyTorch's allocator writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchfinder.programs.peak import AllocatorHistory, line_of
from batchfinder.recording.user_code import is_library

FRAMES = [
    {"filename": "/libraries/torch/nn.py", "name": "forward", "line": 7},
    {"filename": "/project/me/model.py", "name": "forward", "line": 31},
    {"filename": "/project/me/train.py", "name": "<module>", "line": 5},
]


def event(action: str, address: int, size: int, noted: str = "") -> dict[str, Any]:
    """As `torch.cuda.memory._snapshot()` has them."""
    return {"action": action, "addr": address, "size": size, "user_metadata": noted, "frames": FRAMES}


def snapshot(events: list[dict[str, Any]], alive: dict[int, int]) -> dict[str, Any]:
    """With the blocks that are alive at its end, by address; a free one and another card's lie beside them."""
    blocks = [
        {"address": address, "requested_size": size, "size": 512, "state": "active_allocated", "frames": FRAMES}
        for address, size in alive.items()
    ]
    free = {"address": 99, "size": 1 << 20, "state": "inactive"}
    other = {"address": 98, "size": 1 << 30, "state": "active_allocated"}
    return {
        "device_traces": [events, [event("alloc", 98, 1 << 30)]],
        "segments": [{"device": 0, "blocks": [*blocks, free]}, {"device": 1, "blocks": [other]}],
    }


def test_the_peak_is_where_most_is_alive() -> None:
    """A block that was released before it does not count, one that was released after it does."""
    events = [
        event("alloc", 1, 1024),
        event("alloc", 2, 2048),
        event("free_requested", 1, 1024),
        event("free_completed", 1, 1024),
        event("alloc", 3, 4096, "backward train.py:5"),
        event("free_requested", 3, 4096),
        event("alloc", 1, 512),
    ]
    history = AllocatorHistory.of(snapshot(events, {1: 512, 2: 2048}), 0)
    after = history.peak()
    alive = history.alive(after)
    assert {address: block.size for address, block in alive.items()} == {2: 2048, 3: 4096}
    assert alive[3].noted == "backward train.py:5"
    assert history.alive(len(history.events))[1] != history.alive(1)[1]  # another block at the same address


def test_sizes_are_rounded_as_the_allocator_does() -> None:
    """Two of 513 bytes take more than one of 1,024 and one of 512 would."""
    history = AllocatorHistory.of(snapshot([event("alloc", 1, 513), event("alloc", 2, 1)], {1: 513, 2: 1}), 0)
    assert [block.size for block in history.alive(2).values()] == [1024, 512]


def test_blocks_from_before_the_history() -> None:
    """They count until they are released; of those that stay, where they were made is known."""
    events = [event("free_requested", 5, 8192), event("alloc", 6, 1024)]
    history = AllocatorHistory.of(snapshot(events, {6: 1024, 7: 2048}), 0)
    assert history.peak() == 0
    alive = history.alive(0)
    assert {address: block.size for address, block in alive.items()} == {5: 8192, 7: 2048}
    assert {block.event for block in alive.values()} == {None}
    assert line_of(alive[7].frames, lambda file: "libraries" in file).endswith("me/model.py:31")
    assert history.peak(1) == 2  # of what came after the release
    assert set(history.alive(2)) == {6, 7}


def test_a_line_of_libraries_alone_is_none() -> None:
    """So that nothing is made up."""
    assert line_of(FRAMES, lambda file: True) == ""


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (torch.__file__, True),
        ("/opt/more/lib/python3.11/site-packages/trl/trainer/sft_trainer.py", True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True),
        ("/srv/project/train.py", False),
    ],
)
def test_whose_code_it_is(file: str, library: bool) -> None:
    """A package may be installed beside this environment."""
    assert is_library(file) is library
