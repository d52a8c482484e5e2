"""What holds the memory over some steps, from histories as PyTorch's allocator writes them."""

from __future__ import annotations

from batchfinder.programs.peak import AliveBlock, AllocatorHistory
from batchfinder.programs.timeline import memory_timeline
from tests.programs.test_peak import event, snapshot


def phase_of(block: AliveBlock) -> str:
    """As it was noted."""
    return block.noted or "other"


def test_what_holds_the_memory() -> None:
    """A gradient is one from its allocation on, weights from before; an address that is used again is another block."""
    events = [
        event("alloc", 1, 512, "forward"),  # of an earlier step, as all to the next comment
        event("alloc", 5, 512, "backward"),
        event("alloc", 6, 512, "backward"),
        event("free_requested", 6, 512),
        event("alloc", 6, 512, "optimizer"),
        event("free_requested", 1, 512),  # of those that are shown
        event("free_requested", 5, 512),
        event("free_requested", 6, 512),
        event("alloc", 1, 1024, "forward"),
        event("alloc", 2, 2048, "backward"),
        event("free_requested", 1, 1024),
        event("alloc", 1, 512, "backward"),
        event("free_requested", 1, 512),
        event("alloc", 3, 4096, "optimizer"),
        event("free_requested", 2, 2048),
    ]
    history = AllocatorHistory.of(snapshot(events, {3: 4096, 7: 8192}), 0)
    seen = memory_timeline(
        history,
        5,
        known={7: "weights", 3: "optimizer state"},
        gradients={3: {5, 6}, 13: {2}},
        phase_of=phase_of,
        line_of=lambda block: f"train.py:{block.event}",
        step_of=lambda number: 4 + (number > 13),
    )
    assert seen["by_kind"] == {
        "parameters": [8192] * 10,
        "activations": [0, 0, 0, 1024, 1024, 0, 0, 0, 0, 0],
        "gradients": [512, 0, 0, 0, 2048, 2048, 2048, 2048, 2048, 0],
        "temporary": [512, 512, 0, 0, 0, 0, 512, 0, 0, 0],
        "optimizer": [0, 0, 0, 0, 0, 0, 0, 0, 4096, 4096],
    }
    assert seen["lines"] == [f"train.py:{number}" for number in (0, 1, 4, 8, 9, 8, 11, 11, 13, 9)]
    assert seen["marks"] == [(0, 4, "forward"), (4, 4, "backward"), (8, 4, "optimizer"), (9, 5, "optimizer")]
