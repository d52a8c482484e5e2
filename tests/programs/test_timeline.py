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
        event("alloc", 1, 512, "forward"),  # of an earlier step
        event("free_requested", 1, 512),
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
        2,
        known={7: "weights", 3: "optimizer state"},
        gradients={7: {2}},
        phase_of=phase_of,
        line_of=lambda block: f"train.py:{block.event}",
        step_of=lambda number: 4 + (number > 7),
    )
    assert seen["by_kind"] == {
        "parameters": [8192] * 7,
        "activations": [1024, 1024, 0, 0, 0, 0, 0],
        "gradients": [0, 2048, 2048, 2048, 2048, 2048, 0],
        "temporary": [0, 0, 0, 512, 0, 0, 0],
        "optimizer": [0, 0, 0, 0, 0, 4096, 4096],
    }
    assert seen["lines"] == [f"train.py:{number}" for number in (2, 3, 2, 5, 5, 7, 3)]
    assert seen["marks"] == [(0, 4, "forward"), (1, 4, "backward"), (5, 4, "optimizer"), (6, 5, "optimizer")]
